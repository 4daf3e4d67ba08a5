"""The same target, drafters and prompts in this package and in its peers, on this machine.

    LD_PRELOAD=.../libblas.so.3 OPENBLAS_NUM_THREADS=2 python -m tests.bench.peers.compare \\
        runs/peers/demo.jsonl --target TARGET --drafter DSPARK --drafter DFLASH \\
        --draft-lm SMALL --prompts held-out.jsonl
    python -m tests.bench.peers.report runs/peers/demo.jsonl

Peers come from PyPI, each into an environment of its own under --environments; nothing of them is
kept here, and `worker.py` calls only their public functions. Every way of decoding runs in its own
process; for each prompt all ways are measured in turn, --rounds times. Records are appended to the
output one a line, so an interrupted run goes on where it stopped. --drafter takes DSpark and DFlash
checkpoints in SpecForge's layout (`dspine-mlx train run --export hf`), --draft-lm a small language
model for mlx-lm's own speculative decoding (`draft_lm` makes one).
"""

import json
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from dspine_mlx.load import load
from dspine_mlx.measure.compare import Models, divergence_margin
from dspine_mlx.measure.prompts import load_suite
from dspine_mlx.round.sampler import Sampler
from tests.bench.peers.code_lines import code_lines
from tests.bench.peers.report import PLAIN, Record, divergences, read_records, runs

WORKER = Path(__file__).with_name("worker.py")
REQUIREMENTS = {  # the versions whose functions worker.py knows
    "mlx_dspark": "mlx-dspark==0.20.3",
    "dflash_mlx": "dflash-mlx==0.1.8",
    "dflash": "dflash==0.1.0",
}


@dataclass(frozen=True)
class Mode:
    """A row of the table. length None: the package's own choice of one, round by round."""

    name: str
    package: str
    draft_model: Path | None = None
    length: int | None = None


def modes_for(drafters: list[Path], draft_lm: Path | None) -> Iterator[Mode]:
    """Plain decoding first, then every package that takes a checkpoint of the kind."""
    yield Mode(PLAIN, "mlx_lm")
    if draft_lm is not None:
        for length in (2, 4):
            yield Mode(f"mlx-lm, small model, {length} tokens", "mlx_lm", draft_lm, length)
    for drafter in drafters:
        config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
        kind = config["architectures"][0].removesuffix("DraftModel")
        whole = config["block_size"] - (kind == "DFlash")
        packages = ["dspine_mlx", "mlx_dspark"] + ["dflash_mlx"] * (kind == "DFlash")
        for package in packages:
            name = f"{package.replace('_', '-')}, {kind}"
            yield Mode(f"{name}, own length", package, drafter)
            yield Mode(f"{name}, {whole} tokens", package, drafter, whole)
        if kind == "DFlash":
            yield Mode(f"dflash (z-lab), {kind}, {whole} tokens", "dflash", drafter, whole)


def interpreter(package: str, environments: Path) -> Path:
    """Python with the package, which is installed there if it isn't yet."""
    if package not in REQUIREMENTS:
        return Path(sys.executable)
    folder = environments / package
    python = folder.absolute() / "bin" / "python"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True, clear=True)
        backend = "mlx[cpu]" if sys.platform == "linux" else "mlx"
        same = [f"{backend}=={version('mlx')}", f"mlx-lm=={version('mlx-lm')}"]
        install = [str(python), "-m", "pip", "install", "-q", REQUIREMENTS[package], *same]
        subprocess.run(install, check=True)
        (folder / "installed").touch()
    return python


class Worker:
    """A way of decoding in its own process; a reply holds "error" if it failed."""

    def __init__(self, mode: Mode, target: Path, environments: Path):
        command: list[object] = [interpreter(mode.package, environments), WORKER, mode.package]
        command += ["--target", target]
        command += ["--draft-model", mode.draft_model] if mode.draft_model else []
        command += ["--length", mode.length] if mode.length else []
        self.mode, self.scratch = mode, TemporaryDirectory()
        command += ["--scratch", self.scratch.name]
        self.process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def read(self) -> Record:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return {"error": f"the process ended with status {self.process.wait()}"}
        reply: Record = json.loads(line)
        return reply

    def ask(self, prompt: list[int], max_tokens: int) -> Record:
        assert self.process.stdin is not None
        request = {"prompt": prompt, "max_tokens": max_tokens}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.read()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.scratch.cleanup()


class Book:
    """The output: settings, then facts, measurements and errors, each written when it is there."""

    def __init__(self, path: Path, settings: Record):
        self.path = path
        self.records = read_records(path) if path.exists() else []
        if not self.records:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.add(settings)
        elif self.records[0] != settings:
            raise typer.BadParameter(f"{path} has other settings; name a new file")

    def add(self, record: Record) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            print(json.dumps(record), file=file)
        self.records.append(record)

    def failed(self, mode: Mode) -> bool:
        return any(r.get("way") == mode.name and "error" in r for r in self.records)


def start(book: Book, worker: Worker, prompt: list[int], max_tokens: int) -> None:
    """Wait until it is ready, note what it is, and warm it up."""
    reply = worker.read()
    if "error" not in reply:
        facts = {"version": reply["version"], "code_lines": code_lines(Path(reply["folder"]))}
        book.add({"way": worker.mode.name} | facts)
        reply = worker.ask(prompt, max_tokens)
    if "error" in reply:
        book.add({"way": worker.mode.name, "error": reply["error"]})


def measure(
    book: Book, workers: list[Worker], prompts: list[list[int]], rounds: int, max_tokens: int
) -> None:
    """Each prompt by every mode in turn, `rounds` times, but for what is on record."""
    done = {w.mode: runs(book.records, w.mode.name).keys() for w in workers}
    for index, prompt in enumerate(prompts):
        for round_ in range(rounds):
            for worker in workers:
                if (index, round_) not in done[worker.mode] and not book.failed(worker.mode):
                    place = {"way": worker.mode.name, "prompt": index, "round": round_}
                    book.add(place | worker.ask(prompt, max_tokens))


def add_margins(book: Book, pair: Models, prompts: list[list[int]]) -> None:
    """For each divergence, how far the target prefers plain decoding's token."""
    plain = runs(book.records, PLAIN)
    for mode in book.records[0]["ways"]:
        for prompt, after in list(divergences(book.records, mode)):
            a, b = plain[prompt, 0]["tokens"], runs(book.records, mode)[prompt, 0]["tokens"]
            if after < min(len(a), len(b)):
                margin = divergence_margin(pair, prompts[prompt], a, after, b[after])
                book.add({"way": mode, "prompt": prompt, "margin": margin})


def main(
    output: Annotated[Path, typer.Argument(help="Records, one JSON object a line.")],
    target: Annotated[Path, typer.Option(help="Folder of the target.")],
    drafter: Annotated[list[Path], typer.Option(help="Folder of a drafter; may be repeated.")],
    prompts: Annotated[str, typer.Option(help="A suite or file, as for `dspine-mlx bench`.")],
    draft_lm: Annotated[Path | None, typer.Option(help="A small model for mlx-lm.")] = None,
    limit: Annotated[int, typer.Option(help="Prompts to use.")] = 10,
    max_tokens: Annotated[int, typer.Option(help="Tokens per text.")] = 128,
    rounds: Annotated[int, typer.Option(help="Times that every text is made.")] = 3,
    own_length: Annotated[bool, typer.Option(help="Also where packages choose a length.")] = True,
    environments: Annotated[Path, typer.Option(help="Where peers are.")] = Path("runs/peers"),
) -> None:
    every = modes_for(drafter, draft_lm)
    modes = [w for w in every if own_length or w.length or w.draft_model is None]
    model, tokenizer, drafter_ = load(target, drafter[0])
    assert drafter_ is not None
    chats = load_suite(prompts, limit, typer.echo)
    texts = [tokenizer.apply_chat_template(c, add_generation_prompt=True) for c in chats]
    sizes = {"prompts": len(texts), "rounds": rounds, "max_tokens": max_tokens}
    book = Book(output, {"ways": [mode.name for mode in modes]} | sizes)
    with ExitStack() as stack:
        workers = []
        for mode in modes:
            if not book.failed(mode):
                workers.append(stack.enter_context(Worker(mode, target, environments)))
                start(book, workers[-1], texts[0], max_tokens)
        measure(book, workers, texts, rounds, max_tokens)
    add_margins(book, Models(model, tokenizer, drafter_, Sampler()), texts)


if __name__ == "__main__":
    typer.run(main)
