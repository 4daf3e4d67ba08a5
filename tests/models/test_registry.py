"""The registry's file, names of models, and users' own entries."""

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspine_mlx.checkpoints.detect import UNSUPPORTED
from dspine_mlx.convert.report import report
from dspine_mlx.drafters import METHODS
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO
from dspine_mlx.models.registry import (
    PAIR,
    SHIPPED,
    Entry,
    base_name,
    entry_from,
    fitting,
    read_entries,
    registry,
)
from tests.support.hub import DRAFTER, TARGET, cache_model, entry, own_registry

ENTRIES = read_entries(SHIPPED)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_an_entry_is_complete_and_says_where_it_comes_from(entry: Entry) -> None:
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.id)
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", target) for target in entry.targets)
    for source in (*entry.sources, *(p.source for p in entry.published)):
        assert source.startswith("https://")
    refused = {kind.title.lower() for kind in UNSUPPORTED}
    assert entry.method in METHODS.keys() | refused
    assert entry.revision is None or re.fullmatch(r"[0-9a-f]{40}", entry.revision)
    assert entry.block is None or 1 < entry.block <= 16
    for p in entry.published:
        most = entry.block or 16
        assert 1 < p.tokens_per_round <= most + 1
        assert p.offered is not None
        assert p.tokens_per_round <= p.offered + 1 <= most + 1
    if entry.gigabytes and entry.parameters:  # 16 bits per parameter
        assert entry.gigabytes == pytest.approx(2e-9 * entry.parameters, rel=0.02)


def test_entries_are_named_once_and_nothing_claims_to_be_tested() -> None:
    ids = [entry.id for entry in ENTRIES]
    assert len(ids) == len(set(ids))
    assert {entry.tested for entry in ENTRIES} == {"nothing"}


@pytest.mark.parametrize(
    ("model", "name", "packing"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b", ""),
        ("mlx-community/Qwen3-8B-4bit", "qwen3-8b", "4bit"),
        ("mlx-community/Qwen3-8B-4bit-DWQ", "qwen3-8b", "4bit"),
        ("mlx-community/Qwen3-8B-MLX-8bit", "qwen3-8b", "8bit"),
        ("lmstudio-community/Qwen3-8B-MLX-4-bits", "qwen3-8b", "4bit"),
        ("mlx-community/Qwen3-8B-bf16", "qwen3-8b", "bf16"),
        ("mlx-community/gpt-oss-20b-MXFP4-Q8", "gpt-oss-20b", "mxfp4"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b-base", ""),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b-instruct-2507", ""),
    ],
)
def test_a_name_without_its_packing(model: str, name: str, packing: str) -> None:
    assert base_name(model) == (name, packing)


def test_a_sibling_is_another_model() -> None:
    ids = [e.id for e in fitting("mlx-community/Qwen3-8B-4bit", ENTRIES)]
    assert "deepseek-ai/dspark_qwen3_8b_block7" in ids
    assert all("8b" in i.lower() for i in ids)
    for other in ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-80B", "Qwen/Qwen3-18B"):
        assert fitting(other, ENTRIES) == []


def test_a_drafter_may_be_for_some_packings_only() -> None:
    one = entry_from(entry(quantizations=["4bit"]), "here")
    assert one.fits("toy/Word-Problems-4bit")
    assert not one.fits("toy/Word-Problems-8bit")
    assert not one.fits("toy/Word-Problems")


def test_folders_are_known_by_their_name_their_path_or_the_cached_model(tmp_path: Path) -> None:
    one = entry_from(entry(), "here")
    named = tmp_path / "Word-Problems-8bit"
    named.mkdir()
    assert one.fits(str(named))
    source = tmp_path / "plain"
    source.mkdir()
    assert not one.fits(str(source))
    assert one.fits(str(cache_model(tmp_path, TARGET, source)))
    assert entry_from(entry(targets=[str(source)]), "here").fits(f"{source}/.")
    assert not entry_from(entry(targets=[str(tmp_path / "b" / "plain")]), "here").fits(str(source))


def test_own_entries_come_first_and_replace_those_that_ship(tmp_path: Path) -> None:
    taken = ENTRIES[2].id
    own_registry(tmp_path, entry(), entry(id=taken, note="mine"))
    found = registry(tmp_path)
    assert [e.id for e in found[:2]] == [DRAFTER, taken]
    assert [e.note for e in found if e.id == taken] == ["mine"]
    assert len(found) == len(ENTRIES) + 2
    assert registry(tmp_path / "nobody") == [*ENTRIES, PAIR]


def test_the_pair_that_ships_is_known_as_it_is() -> None:
    facts = report(DEMO / "drafter")
    assert (PAIR.method, PAIR.block) == (facts["method"], facts["block_size"])
    assert fitting(str(DEMO / "target"), registry()) == [PAIR]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "is not valid JSON"),
        ("[]", "holds a list"),
        ("{}", 'an object with "drafters"'),
        ('{"drafters": [3]}', "drafter 1 is 3"),
        (json.dumps({"drafters": [entry(speed=3)]}), "has speed; known are id, targets"),
        (json.dumps({"drafters": [{"id": "a/b"}]}), "lacks targets, method, sources"),
        (json.dumps({"drafters": [entry(targets="x")]}), "targets is 'x'"),
        (json.dumps({"drafters": [entry(published=3)]}), "published is 3"),
        (
            json.dumps(
                {
                    "drafters": [
                        entry(
                            published=[
                                {
                                    "tokens_per_round": 0.5,
                                    "texts": "t",
                                    "where": "w",
                                    "source": "s",
                                }
                            ]
                        )
                    ]
                }
            ),
            "tokens_per_round is 0.5",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    path = own_registry(tmp_path)
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(message)):
        registry(tmp_path)


PUBLISHED = {"tokens_per_round": 2, "texts": "t", "where": "w", "source": "s", "offered": 3}
NUMBERS = ("block", "gigabytes", "parameters", "tokens_per_round", "offered")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


@given(name=st.sampled_from([f.name for f in fields(Entry)] + sorted(PUBLISHED)), value=JSON)
def test_any_value_of_an_own_entry_is_of_its_type_or_refused(name: str, value: Any) -> None:
    inner = name in PUBLISHED
    wrong = entry(published=[PUBLISHED | ({name: value} if inner else {})])
    try:
        found = entry_from(wrong if inner else wrong | {name: value}, "here")
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    hash(found)
    kept = getattr(found.published[0] if inner else found, name)
    assert name not in NUMBERS or kept is None or 0 < kept < math.inf
    assert name != "automatic" or isinstance(kept, bool)
    assert found.fits("toy/Word-Problems") in (True, False)
