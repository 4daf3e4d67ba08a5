"""The documentation, followed to the letter on the pair that ships.

Commands and snippets run page by page, in order, in a folder of their own. What a test can't do is
marked in the page (`documentation.NEEDS`) and still parsed by the real command line.
"""

import ast
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from functools import partial
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.sample_utils import make_sampler
from typer.testing import CliRunner

import dspine_mlx
from dspine_mlx.checkpoints.files import read_config
from dspine_mlx.cli import app
from dspine_mlx.cli.prompting import apply_template, messages_of
from dspine_mlx.load import DEMO
from dspine_mlx.verify_length.store import load_calibrations
from tests.support.documentation import (
    FILES,
    PAGES,
    Block,
    blocks,
    commands,
    filled,
)
from tests.support.serving import Server, serving
from tests.support.understanding import (
    Call,
    ours,
    parse_words,
    pip_understands,
    script_understands,
    understood,
)

pytestmark = pytest.mark.slow

SHORT = {  # what makes a command quick; the last value of an option counts
    "bench": "--limit 1 --repeat 1 --max-tokens 16",
    "calibrate": "--limit 2 --max-tokens 24",
    "generate": "--max-tokens 24",
    "serve": "--no-profile --max-tokens 24",
    "train eval": "--prompts 1 --max-tokens 16",
    "train regenerate": "--max-tokens 8",
    "train run": "--set train.steps=2 --set train.batch_size=2 --set train.num_anchors=4 "
    "--set drafter.num_hidden_layers=1 --set drafter.transfer_rank=16 "
    "--set drafter.message_size=8",
}


# ---- what must come out


def wanted_text(params: dict[str, Any]) -> str:
    """mlx-lm's own text for what `generate` was asked."""
    if params["seed"] is not None:
        mx.random.seed(params["seed"])
    model, tokenizer = mlx_lm.load(params["model"] or str(DEMO / "target"))
    messages = messages_of(params["prompt"], params["system_prompt"], None)
    tokens = apply_template(tokenizer, messages, {})
    sampler = make_sampler(params["temp"], params["top_p"], top_k=params["top_k"])
    return mlx_lm.generate(
        model, tokenizer, tokens, max_tokens=params["max_tokens"], sampler=sampler
    )


def check_generate(call: Call) -> None:
    text = call.stdout.removesuffix("\n")
    if call.params["as_json"]:
        report = json.loads(call.stdout.splitlines()[-1])
        assert report["rounds"] > 0
        text = report["text"]
    elif not call.params["quiet"]:
        assert ("tokens per round" in call.stderr) == (call.params["verify_length"] != "0")
    if call.params["temp"] == 0 or call.params["seed"] is not None:
        assert text == wanted_text(call.params)
    assert text.strip()
    assert ("what happened" in call.stderr) == call.params["explain"]


def check_bench(call: Call) -> None:
    if call.params["live"]:
        for word in ("plain decoding ", "drafted ", "verdict "):
            assert word in call.stdout
        return
    for mode in call.params["compare"].split(","):
        assert mode in call.stdout


def check_calibrate(call: Call) -> None:
    _, _, drafter = dspine_mlx.load(call.params["model"], call.params["draft_model"])
    assert drafter is not None
    modes = load_calibrations(drafter, call.params["output"])
    assert len(modes) == len(call.params["temps"].split(","))


def check_convert(call: Call) -> None:
    if call.params["dry_run"]:
        assert "Would write" in call.stdout
    else:
        assert read_config(call.params["mlx_path"])["dspine_mlx"]["method"] == "dspine"


def check_doctor(call: Call) -> None:
    assert metadata.version("mlx-lm") in call.stdout


def check_inspect(call: Call) -> None:
    assert "dspine" in call.stdout
    assert "problems" not in call.stdout


def check_run(call: Call) -> None:
    drafter = call.params["output"] / "drafter"
    _, _, trained = dspine_mlx.load(DEMO / "target", drafter)
    assert trained is not None
    assert type(trained.network).__name__.lower() == call.params["method"]


def check_regenerate(call: Call) -> None:
    lines = call.params["output"].read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(FILES["prompts.jsonl"].splitlines())
    assert not any("They have many." in line for line in lines)


def check_report(call: Call) -> None:
    assert metadata.version("mlx-lm") in call.params["output"].read_text(encoding="utf-8")


def check_eval(call: Call) -> None:
    assert "tokens per round" in call.stdout


CHECKS: dict[str, Callable[[Call], None]] = {
    "bench": check_bench,
    "calibrate": check_calibrate,
    "convert": check_convert,
    "doctor": check_doctor,
    "generate": check_generate,
    "inspect": check_inspect,
    "report": check_report,
    "train eval": check_eval,
    "train regenerate": check_regenerate,
    "train run": check_run,
}


def check_readme(names: dict[str, Any], printed: str) -> None:
    params = understood(["generate", "-p", "Why is the sky blue?", "-m", "100"]).params
    assert printed.startswith(wanted_text(params) + "\n")
    assert printed.endswith(" tokens per round\n")


def check_families(names: dict[str, Any], printed: str) -> None:
    """Two turns; the second one, whose first half is cached, is plain decoding's too."""
    names["stream_generate"] = partial(names["stream_generate"], max_tokens=16)
    tokens = names["tokenizer"].encode("Ali has 52 caps.")
    for _ in range(2):
        out = names["reply"](tokens)
        plain = mlx_lm.stream_generate(names["model"], names["tokenizer"], tokens, max_tokens=16)
        assert out == [response.token for response in plain]
        tokens = tokens + out
        assert names["caches"].fetch_nearest_cache("pair", [*tokens, 5])[1] == [5]


def check_converting(names: dict[str, Any], printed: str) -> None:
    codes, projection = mx.array(names["codes"]), mx.array(names["projection"])
    assert (codes.shape, projection.shape) == ((60, 8), (24, 8))
    assert mx.allclose(mx.linalg.norm(codes, axis=1), mx.array(1.0), atol=1e-5)


def check_server(names: dict[str, Any], printed: str) -> None:
    assert printed.lstrip().startswith("{")
    assert "'path': 'speculative'" in printed


def check_python(names: dict[str, Any], printed: str) -> None:
    model, tokenizer, prompt = names["model"], names["tokenizer"], names["prompt"]
    assert len(names["words"]) > 20
    assert names["drafted"] == names["plain"]
    assert "tokens per round" in printed
    assert "there is no folder no/such/folder" in printed
    tokens = list[int]()
    for turn, name in ((prompt, "first"), (names["more"], "second"), (names["more"], "third")):
        tokens += turn
        out = list(mlx_lm.stream_generate(model, tokenizer, tokens, max_tokens=16))
        assert names[name] == "".join(response.text for response in out)
        tokens += [response.token for response in out]
    assert names["cache"][0].offset == len(tokens)


def check_exactness(names: dict[str, Any], printed: str) -> None:
    assert len(names["plain"]) == len(names["drafted"]) > 1
    assert printed == "identical\n"


def check_quick_start(names: dict[str, Any], printed: str) -> None:
    params = understood(["generate", "-p", "Why is the sky blue?", "-m", "40"]).params
    assert printed == wanted_text(params) + "\n"


PAGE_CHECKS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "README.md": check_readme,
    "docs/converting.md": check_converting,
    "docs/exactness.md": check_exactness,
    "docs/notes/families.md": check_families,
    "docs/python-api.md": check_python,
    "docs/quick-start.md": check_quick_start,
    "docs/server.md": check_server,
}


def given(page: str) -> dict[str, Any]:
    """Names that a page's snippets take for granted."""
    if page == "docs/converting.md":
        return {"lm_head": mx.random.normal((60, 24)), "rank": 8}
    if page == "docs/notes/families.md":
        return dict(zip(("model", "tokenizer", "drafter"), dspine_mlx.load(), strict=True))
    return {}


# ---- doing it


class Servers:
    """Servers by their arguments, each started once."""

    def __init__(self, folder: Path):
        self.folder, self.running, self.stack = folder, dict[str, Server](), ExitStack()

    def get(self, arguments: list[str]) -> Server:
        key = " ".join(arguments)
        if key not in self.running:
            folder = self.folder / str(len(self.running))
            flags = [*arguments, *SHORT["serve"].split()]
            server = serving("dspine_mlx.server", folder, *flags)
            self.running[key] = self.stack.enter_context(server)
        return self.running[key]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    with servers.stack:
        yield servers


ADDRESS = "http://127.0.0.1:8080"


class Reader:
    """Someone who does what a page says."""

    def __init__(self, page: str, servers: Servers):
        self.names, self.servers = given(page), servers
        self.server: Server | None = None  # the last one that was started
        self.printed = ""

    def follow(self, block: Block) -> None:
        if block.language == "python":
            self.run(block)
        elif block.language == "bash":
            for words in commands(block):
                self.enter(words, str(block))

    def run(self, block: Block) -> None:
        text = filled(block.text)
        if self.server is not None:
            text = text.replace(ADDRESS, f"http://127.0.0.1:{self.server.port}")
        with redirect_stdout(StringIO()) as output:
            exec(compile(text, str(block), "exec"), self.names)
        self.printed += output.getvalue()

    def enter(self, words: list[str], where: str) -> None:
        arguments = ours(words)
        if arguments is not None and arguments[0] == "serve":
            understood(arguments)
            self.server = self.servers.get(arguments[1:])
            message = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
            self.ask("/v1/chat/completions", json.dumps(message))
        elif arguments is not None:
            self.call(arguments, where)
        elif words[0] == "curl":
            self.curl(words[1:])
        else:  # scripts that measure: too long to run
            assert words[0] == "python", f"{where}: {words[0]} can't run here; mark the fence"
            assert parse_words(words), where

    def call(self, arguments: list[str], where: str) -> None:
        name = understood(arguments).name
        arguments = [*arguments, *SHORT.get(name, "").split()]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{where}: {result.stderr}{result.exception!r}"
        call = Call(name, understood(arguments).params, result.stdout, result.stderr)
        assert call.params.get("dry_run") or all(path.exists() for path in call.paths), where
        assert call.stdout.strip() or call.stderr.strip()
        CHECKS.get(name, lambda call: None)(call)

    def curl(self, words: list[str]) -> None:
        flags = {"-N", "-s"}
        rest = [word for word in words if word not in flags]
        url = next(word for word in rest if word.startswith(ADDRESS))
        rest.remove(url)
        assert rest[::2] == ["-d"] * (len(rest) // 2)
        self.ask(url.removeprefix(ADDRESS), *rest[1::2])

    def ask(self, path: str, body: str | None = None) -> None:
        """A request; the text of a reply is mlx-lm's own."""
        assert self.server is not None, "start a server first"
        reply = self.server.request(path, None if body is None else body.encode())
        assert reply.status == 200, reply
        if body is None:
            return
        message = json.loads(body)
        if message.get("stream"):
            deltas = [e["choices"][0]["delta"] for e in reply.events if e["choices"]]
            text = "".join(delta.get("content") or "" for delta in deltas)
        else:
            text = reply.body["choices"][0]["message"]["content"]
        tokens = str(message.get("max_tokens", 24))
        prompt = message["messages"][-1]["content"]
        assert text == wanted_text(understood(["generate", "-p", prompt, "-m", tokens]).params)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_says_works(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: Servers
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    reader = Reader(page, servers)
    for block in blocks(page):
        if not block.needs:
            reader.follow(block)
    if page in PAGE_CHECKS:
        PAGE_CHECKS[page](reader.names, reader.printed)


MARKED = [block for page in PAGES for block in blocks(page) if block.needs]
OTHERS = {"python", "python3", "pre-commit", "curl", "git", "launchctl", "sudo"}


@pytest.mark.parametrize("block", MARKED, ids=str)
def test_what_can_not_run_here_is_understood(block: Block) -> None:
    if block.language == "python":
        body = ast.parse(block.text).body
        imports = [line for line in body if isinstance(line, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module([*imports], []), str(block), "exec"), {})
        return
    for words in commands(block):
        assert parse_words(words) or Path(words[0]).name in OTHERS, words


def test_a_renamed_option_would_be_noticed() -> None:
    with pytest.raises(Exception, match="No such option: --max-token"):
        understood(["generate", "-p", "a", "--max-token", "3"])
    with pytest.raises(SystemExit):
        understood(["serve", "--model", "a", "--drafter", "b"])
    with pytest.raises(SystemExit):
        script_understands("tests.bench.simulate", ["--traces", "x"])
    with pytest.raises(Exception, match="No such option: --text"):
        script_understands("tests.bench.pictures", ["reliability", "x.png", "--text", "3"])
    with pytest.raises(AssertionError, match="nosuch"):
        pip_understands(["-e", ".[cpu,nosuch]"])
