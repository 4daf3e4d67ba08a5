"""Texts of two processes: plain decoding's in the same group, and one process's in float32."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from dspine_mlx.round.sampler import Sampler
from tests.support.families import build
from tests.support.ranks import run_ranks, save_target
from tests.support.tiny import random_prompt

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

PROMPT, TOKENS = random_prompt(40), 24
QUANTISED = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 44}
WINDOW = {"max_kv_size": 24}
SEEDED = {"temp": 0.8, "seeded": True}
BASE: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"length": 7},
    "parked": {"length": 0},
    "auto": {"length": "auto"},
    "measured": {"length": "auto", "profile": True},
    "exact": {"length": 7, "kernels": "exact"},
    "seeded": {"length": 5, "sampler": SEEDED},
    "quantised": {"length": 7, "options": QUANTISED},
    "window": {"length": 7, "options": WINDOW},
}
FEW = ("greedy", "parked", "seeded")
TARGETS: dict[str, tuple[str, bool, int, tuple[str, ...]]] = {  # family, pipeline, ranks, cases
    "tensors": ("qwen3", False, 2, tuple(CASES)),
    "hybrid tensors": ("qwen3_5", False, 2, FEW),
    "layers": ("qwen3_moe", True, 2, (*FEW, "quantised")),
    "hybrid layers": ("qwen3_5", True, 2, FEW),
    "four stages": ("qwen3_moe", True, 4, ("greedy", "parked")),
}
CHANGES: dict[str, Any] = {"head_dim": 32}
DENSE: dict[str, Any] = {"mlp_only_layers": [0, 1, 2, 3]}


def model_of(family: str) -> Any:
    return build(family, **CHANGES | (DENSE if family == "qwen3_moe" else {}))


@pytest.fixture(scope="module", params=[2, 4])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What all ranks of one group wrote, for the targets of this many ranks."""
    ranks: int = request.param
    folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
    jobs = {}
    for name, (family, pipeline, size, cases) in TARGETS.items():
        if size == ranks:
            target = folder / name.replace(" ", "-")
            save_target(model_of(family), target, parts=2 if pipeline else 0)
            own = {case: BASE | CASES[case] for case in cases}
            jobs[name] = {"target": str(target), "pipeline": pipeline, "cases": own}
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    ended = run_ranks(ranks, ["-m", "tests.support.group_texts", str(path)], folder)
    assert [e.status for e in ended] == [0] * ranks, "\n".join(e.err for e in ended)
    written = [json.loads(path.with_suffix(f".{rank}").read_text()) for rank in range(ranks)]
    return {name: [one[name] for one in written] for name in jobs}


def of_one_process(folder: Path, case: dict[str, Any]) -> list[int]:
    """mlx-lm's own text, in this process."""
    model, tokenizer = mlx_lm.load(str(folder))
    mx.random.seed(7)
    sampler = Sampler(**case.get("sampler", {}))
    responses = mlx_lm.stream_generate(
        model, tokenizer, PROMPT, max_tokens=TOKENS,
        sampler=sampler if sampler.temp else None, **case.get("options", {}),
    )  # fmt: skip
    return [r.token for r in responses]


def test_texts_are_plain_decodings_in_the_same_group(results: dict[str, Any]) -> None:
    for name, (lead, *_) in results.items():
        for case, found in lead["cases"].items():
            assert found["tokens"] == found["plain"], (name, case)
            assert len(found["tokens"]) == TOKENS, (name, case)
            drafted = CASES[case]["length"] == 7
            assert not drafted or 3 < found["rounds"] < TOKENS - 3, (name, case, found)


def test_texts_are_those_of_one_process(
    results: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name, (lead, *_) in results.items():
        family = TARGETS[name][0]
        folder = save_target(model_of(family), tmp_path_factory.mktemp("one") / family)
        for case, found in lead["cases"].items():
            assert found["tokens"] == of_one_process(folder, CASES[case]), (name, case)


def test_every_rank_has_its_share_of_the_layers(results: dict[str, Any]) -> None:
    for name, ranks in results.items():
        family, pipeline, size, _ = TARGETS[name]
        layers = model_of(family).layers
        whole = sum(v.nbytes for layer in layers for _, v in tree_flatten(layer.parameters()))
        shares = [rank["bytes"] / whole for rank in ranks]
        assert sum(shares) == pytest.approx(1, abs=0.15), name  # norms are on all ranks
        assert all(0.8 / size < share < 1.3 / size for share in shares), (name, shares)


def test_followers_run_one_forward_per_message(results: dict[str, Any]) -> None:
    """As many as rank 0: the prompt's, then one per round, or one per token while it is parked."""
    for name, (lead, *others) in results.items():
        for followed in others:
            forwards = [text["forwards"] for text in followed["texts"]]
            cases = lead["cases"]
            assert forwards[0] == cases["greedy"]["rounds"] + 1, name
            assert forwards[1] == TOKENS + 1, name
            assert len(forwards) >= len(cases)
            for text in followed["texts"][:2]:
                assert text["tokens"][: len(PROMPT)] == PROMPT
                assert not text["failed"]
