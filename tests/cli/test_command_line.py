"""The command line as users meet it: standard streams and exit status."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from typer.testing import CliRunner

from dspine_mlx.cli import app, main
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO

pytestmark = pytest.mark.slow

TARGET = str(DEMO / "target")
PROMPT = "Tom has 4 apples and buys 3 more. How many apples does he have?"


Run = Callable[..., subprocess.CompletedProcess[str]]


def in_a_process(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dspine_mlx.cli", *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The whole program in this process, which has imported what takes a second."""

    def call(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["dspine-mlx", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        status = ended.value.code
        assert isinstance(status, int)
        return subprocess.CompletedProcess(args, status, *capsys.readouterr())

    return call


def wanted(tokenizer: TokenizerWrapper, prompt: str, **options: float) -> str:
    """mlx-lm's own text for the shipped target."""
    if "seed" in options:
        mx.random.seed(int(options.pop("seed")))
    model, _ = mlx_lm.load(TARGET)
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True
    )
    sampler = make_sampler(**options)
    return mlx_lm.generate(model, tokenizer, tokens, max_tokens=24, sampler=sampler)


def test_the_pair_that_ships_generates_offline(tokenizer: TokenizerWrapper) -> None:
    result = in_a_process("generate", "-p", PROMPT, "-m", "24", "--verify-length", "5")
    assert result.returncode == 0, result.stderr
    assert result.stdout == wanted(tokenizer, PROMPT) + "\n"
    assert "pair that ships with dspine-mlx" in result.stderr
    assert "tokens per round" in result.stderr


def test_json_is_the_last_line_and_complete(run: Run, tokenizer: TokenizerWrapper) -> None:
    arguments = ("-p", "-", "-m", "24", "--json", "--verify-length", "5")
    result = run("generate", *arguments, stdin=PROMPT)
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["text"] == wanted(tokenizer, PROMPT)
    assert report["generation_tokens"] == len(report["tokens"]) <= 24
    assert set(report) == {
        "text",
        "tokens",
        "prompt_tokens",
        "generation_tokens",
        "prompt_tps",
        "generation_tps",
        "rounds",
        "drafted",
        "accepted",
        "acceptance_length",
        "accepted_histogram",
        "verify_lengths",
        "peak_memory_gb",
        "finish_reason",
        "verdict",
        "ranks",
    }
    assert report["ranks"] == 1
    assert 0 < report["accepted"] <= report["drafted"]
    histogram = {int(n): rounds for n, rounds in report["accepted_histogram"].items()}
    assert sum(histogram.values()) == report["rounds"] == sum(report["verify_lengths"].values())
    accepted = sum(n * rounds for n, rounds in histogram.items())
    assert accepted == report["accepted"]
    offered = sum(int(n) * rounds for n, rounds in report["verify_lengths"].items())
    assert offered == report["drafted"]
    # The last token is decoded without a draft, or a drafted stop token ends the last round.
    given = report["acceptance_length"] * report["rounds"]
    assert given == pytest.approx(accepted + report["rounds"], abs=1)
    assert report["generation_tokens"] - given == pytest.approx(0, abs=1)


def test_a_seed_gives_mlx_lms_text(run: Run, tokenizer: TokenizerWrapper) -> None:
    result = run("generate", "-p", PROMPT, "-m", "24", "--temp", "0.9", "--seed", "4", "--quiet")
    assert result.stdout == wanted(tokenizer, PROMPT, temp=0.9, seed=4) + "\n"


BAD_ARGUMENTS = {
    "no prompt": ([], "there is no prompt"),
    "empty prompt": (["-p", ""], "the prompt is empty"),
    "no tokens": (["-p", "a", "-m", "0"], "max_tokens is 0; it must be at least 1"),
    "negative tokens": (["-p", "a", "-m", "-5"], "max_tokens is -5"),
    "negative temperature": (["-p", "a", "--temp", "-1"], "temperature is -1.0; it must be"),
    "top-p above 1": (["-p", "a", "--top-p", "2"], r"top_p is 2.0; it must lie in \[0, 1\]"),
    "verify length": (["-p", "a", "--verify-length", "x"], "must be 'auto' or a number"),
    "template arguments": (["-p", "a", "--chat-template-args", "[]"], "must be a JSON object"),
    "no such model": (["-p", "a", "--model", "./nowhere"], "there is no folder ./nowhere"),
    "a drafter alone": (["-p", "a", "--draft-model", TARGET], "needs its target"),
    "a target as drafter": (
        ["-p", "a", "--model", TARGET, "--draft-model", TARGET],
        "this is no drafter of a known layout",
    ),
    "size of chunks": (["-p", "a", "--prefill-step-size", "0"], "prefill_step_size is 0"),
    "size of the cache": (["-p", "a", "--max-kv-size", "3"], "max_kv_size is 3; it must be"),
    "reserved argument": (
        ["-p", "a", "--chat-template-args", '{"add_generation_prompt": true}'],
        "sets add_generation_prompt, which",
    ),
    "min tokens": (["-p", "a", "--min-tokens-to-keep", "0"], "min_tokens_to_keep is 0"),
    "top-k of everything": (
        ["-p", "a", "--temp", "1", "--top-k", "5000"],
        "top_k is 5000; it must",
    ),
    "no such token": (["-p", "a", "--extra-eos-token", "nosuch"], "'nosuch' is no token"),
    "cache groups": (
        ["-p", "a", "-m", "3", "--kv-bits", "4", "--quantized-kv-start", "0"],
        "kv_bits 4 in groups of 64 don't suit",
    ),
    "no cache groups": (
        ["-p", "a", "--kv-bits", "4", "--kv-group-size", "0"],
        "kv_group_size is 0; it must be one of 32, 64 or 128",
    ),
    "bits of a cache": (["-p", "a", "--kv-bits", "7"], "kv_bits is 7; it must be one of 1, 2, 3"),
    "start of quantising": (["-p", "a", "--quantized-kv-start", "-1"], "quantized_kv_start is -1"),
    "negative seed": (["-p", "a", "--seed", "-5"], "seed is -5; it must be at least 0"),
    "huge seed": (["-p", "a", "--seed", "9" * 20], "seed is 9{20}; it must be at most 18446744"),
    "seeded top-k of everything": (
        ["-p", "a", "--temp", "1", "--seed", "1", "--top-k", "2048"],
        "top_k is 2048; it must be below the vocabulary's 2048 tokens",
    ),
    "two lengths": (
        ["-p", "a", "--verify-length", "3", "--num-draft-tokens", "3"],
        "--num-draft-tokens is --verify-length under another name",
    ),
    "negative drafts": (["-p", "a", "--num-draft-tokens", "-1"], "--num-draft-tokens is -1"),
    "bits of a drafter": (["-p", "a", "--draft-quant", "5"], "draft_quant is 5; it must be 4 or 8"),
    "an image": (["-p", "a", "--image", "x.png"], "--image can't be used: drafters read text"),
    "no prompt cache": (["-p", "a", "--prompt-cache-file", "./no"], "there is no prompt cache no"),
    "long prompt": (["-p", "apple " * 600], "the model's context holds 512"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_input_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["generate", *arguments])
    assert isinstance(result.exception, InputError)
    with pytest.raises(InputError, match=message):
        raise result.exception


def test_errors_are_one_sentence_with_a_status(run: Run, tmp_path: Path) -> None:
    bad_input = in_a_process("generate", "-p", "a", "--model", str(tmp_path))
    assert bad_input.returncode == 2
    assert bad_input.stdout == ""
    expected = f"{tmp_path} has no config.json; give the folder of a model or drafter"
    assert bad_input.stderr == f"dspine-mlx: {expected}\n"
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    unknown = run("generate", "-p", "a", "--model", str(tmp_path))
    assert unknown.returncode == 2
    assert "can't be loaded as a target: No safetensors found" in unknown.stderr
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model.safetensors").write_bytes(Path(TARGET, "model.safetensors").read_bytes())
    lacking = run("generate", "-p", "a", "--model", str(tmp_path))
    assert lacking.returncode == 2
    assert "can't be loaded as a target: " in lacking.stderr
    assert run("generate", "--no-such-flag").returncode == 2


def test_a_failure_is_one_sentence_and_a_traceback_with_debug() -> None:
    """What is nobody's input."""
    program = (
        "from dspine_mlx import cli\nfrom dspine_mlx.cli import generate\n"
        "def broken(*_):\n    raise OSError('the disk\\nis gone')\n"
        "generate.read_prompt = broken\ncli.main()"
    )
    for flags, traceback in (([], False), (["--debug"], True)):
        command = [sys.executable, "-c", program, *flags, "generate", "-p", "a"]
        failed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert failed.returncode == 1
        assert ("Traceback" in failed.stderr) == traceback
        if not traceback:
            assert failed.stderr == "dspine-mlx: the disk is gone\n"


def test_a_target_alone_is_decoded_plainly_with_a_hint(run: Run) -> None:
    alone = run("generate", "-p", "a", "-m", "2", "--model", TARGET)
    assert alone.returncode == 0
    hints = [line for line in alone.stderr.splitlines() if "--draft-model" in line]
    assert hints == [
        f"No drafter: plain decoding. {DEMO / 'drafter'} fits this model: add --draft-model auto."
    ]
    plain = run("generate", "-p", "a", "-m", "2", "--model", TARGET, "--verify-length", "0")
    assert "--draft-model" not in plain.stderr


def test_lookup_needs_no_drafter(run: Run, tmp_path: Path) -> None:
    """The answer repeats the question's words; it is that of plain decoding."""
    question = ("generate", "-p", "a b c d e f a b c d e f a b", "-m", "24", "--model", TARGET)
    looked = run(*question, "--draft-model", "lookup", "--json")
    plain = run(*question, "--verify-length", "0", "--json")
    assert looked.returncode == plain.returncode == 0, looked.stderr
    ours, theirs = json.loads(looked.stdout), json.loads(plain.stdout)
    assert ours["tokens"] == theirs["tokens"]
    assert "no drafter" in ours["verdict"]
    (tmp_path / "prompts.txt").write_text("a b c\n")
    pair = ("--model", TARGET, "--draft-model", "lookup")
    refused = run("calibrate", *pair, "--prompts", str(tmp_path / "prompts.txt"))
    assert "there is no drafter to calibrate" in refused.stderr


def test_a_tokenizer_without_a_template_is_said(run: Run, tmp_path: Path) -> None:
    for file in Path(TARGET).iterdir():
        (tmp_path / file.name).symlink_to(file)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    result = run("generate", "-p", "Tom", "-m", "3", "--quiet", "--model", str(tmp_path))
    assert result.returncode == 0
    assert "This tokenizer has no chat template" in result.stderr
    refused = run("generate", "-p", "a", "--system-prompt", "b", "--model", str(tmp_path))
    assert refused.returncode == 2
    assert "--system-prompt can't be used" in refused.stderr
