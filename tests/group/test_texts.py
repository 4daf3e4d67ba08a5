"""Texts of two processes: plain decoding's in the same group, and one process's in float32."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.sample_utils import make_logits_processors

from dspine_mlx.round.sampler import Sampler
from tests.support.bigrams import bigram_target
from tests.support.families import build
from tests.support.ranks import run_ranks, save_target
from tests.support.tiny import random_prompt

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

PROMPT, TOKENS = random_prompt(40), 24
REPEATING = [4 + token % 12 for token in random_prompt(12)] * 3  # in a small vocabulary
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
OPTIONS = tuple(CASES)
CASES |= {"raced": {"length": 7, "kernels": "auto"}}
CASES |= {
    f"raced {k}": {"length": 7, "kernels": k, "options": QUANTISED} for k in ("auto", "exact")
}
BIGRAMS: dict[str, Any] = {"spread": 1.0, "frequency": 0.5}
CASES |= {
    "sampled": {"length": 4, "drafter": "knowing", "bigrams": BIGRAMS, "max_tokens": 450}
    | {"prompt": [4, 5, 6], "sampler": {"temp": 1.0}}
}
PACKING = {"group_size": 32, "bits": 4}
KINDS = ("dflash", "dspine", "dspark", "dflash2", "domino", "lookup")
PER_KIND: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"sampler": SEEDED},
    "penalised": {"sampler": SEEDED, "penalty": 1.3},
}
CASES |= {
    f"{kind} {name}": {"prompt": REPEATING, "max_tokens": 12, "length": 5, "drafter": kind}
    | options
    for kind in KINDS
    for name, options in PER_KIND.items()
}
DRAFTED = tuple(case for case in CASES if CASES[case].get("drafter") in KINDS)
FEW = ("greedy", "parked", "seeded")
MORE = (*FEW, "quantised", "window")
TARGETS: dict[str, tuple[str, bool, int, tuple[str, ...]]] = {  # family, pipeline, ranks, cases
    "tensors": ("qwen3", False, 2, OPTIONS),
    "hybrid tensors": ("qwen3_5", False, 2, FEW),
    "layers": ("qwen3_moe", True, 2, MORE),
    "hybrid layers": ("qwen3_5", True, 2, FEW),
    "drafters tensors": ("qwen3_5", False, 2, DRAFTED),
    "drafters layers": ("qwen3_moe", True, 2, tuple(c for c in DRAFTED if "seeded" not in c)),
    "bigrams": ("qwen3", False, 2, ("sampled",)),
    # The last of a launch: they force what races find.
    "packed": ("qwen3", False, 2, ("raced",)),
    "packed caches": ("qwen3", False, 2, ("raced auto", "raced exact")),
    "half tensors": ("qwen3", False, 2, ("greedy",)),
    "half layers": ("qwen3_moe", True, 2, ("greedy",)),
    "four stages": ("qwen3_moe", True, 4, MORE),
}
CHANGES: dict[str, Any] = {"head_dim": 32}
DENSE: dict[str, Any] = {"mlp_only_layers": [0, 1, 2, 3]}
SMALL: dict[str, Any] = {"vocab_size": 16}  # where drafters of random weights are right at times


def model_of(name: str) -> Any:
    family = TARGETS[name][0]
    if name == "bigrams":
        return bigram_target(SMALL["vocab_size"], **BIGRAMS)
    dense = DENSE if family == "qwen3_moe" else {}
    bits = PACKING["bits"] if name == "packed" else None
    model = build(family, bits, **CHANGES | dense | (SMALL if "drafters" in name else {}))
    if "half" in name:
        model.set_dtype(mx.float16)
    return model


def save(name: str, folder: Path, parts: int = 0) -> Path:
    config = {"quantization": PACKING} if name == "packed" else {}
    return save_target(model_of(name), folder, parts, **config)


FORCED = {"packed": "products", "packed caches": "attention"}
LAUNCHES = {  # targets that share one start
    "options": (
        *("tensors", "hybrid tensors", "half tensors"),
        *("layers", "hybrid layers", "half layers"),
    ),
    "drafters": ("drafters tensors", "drafters layers", "bigrams", "packed", "packed caches"),
    "stages": ("four stages",),
}


@pytest.fixture(scope="module", params=LAUNCHES)
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What all ranks of one group wrote, for the targets of one launch."""
    names = LAUNCHES[request.param]
    folder, ranks = tmp_path_factory.mktemp(request.param), TARGETS[names[0]][2]
    jobs = {}
    for name in names:
        _, pipeline, _, cases = TARGETS[name]
        target = folder / name.replace(" ", "-")
        save(name, target, parts=2 if pipeline else 0)
        own = {case: BASE | CASES[case] for case in cases}
        jobs[name] = {"target": str(target), "pipeline": pipeline, "cases": own}
        jobs[name]["forced"] = FORCED.get(name)
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    ended = run_ranks(ranks, ["-m", "tests.support.group_texts", str(path)], folder)
    assert [e.status for e in ended] == [0] * ranks, "\n".join(e.err for e in ended)
    written = [json.loads(path.with_suffix(f".{rank}").read_text()) for rank in range(ranks)]
    return {name: [one[name] for one in written] for name in jobs}


def of_one_process(model: Any, tokenizer: Any, case: dict[str, Any]) -> list[int]:
    """mlx-lm's own text, in this process."""
    mx.random.seed(7)
    sampler = Sampler(**case.get("sampler", {}))
    responses = mlx_lm.stream_generate(
        model, tokenizer, case["prompt"], max_tokens=case["max_tokens"],
        sampler=sampler if sampler.temp else None,
        logits_processors=make_logits_processors(repetition_penalty=case.get("penalty")),
        **case.get("options", {}),
    )  # fmt: skip
    return [r.token for r in responses]


def test_texts_are_plain_decodings_in_the_same_group(results: dict[str, Any]) -> None:
    for name, (lead, *_) in results.items():
        for case, found in lead["cases"].items():
            if case == "sampled":
                continue
            assert found["tokens"] == found["plain"], (name, case)
            assert len(found["tokens"]) == (BASE | CASES[case])["max_tokens"], (name, case)
            drafted = CASES[case]["length"] == 7
            assert not drafted or 3 < found["rounds"] < TOKENS - 3, (name, case, found)


def test_every_drafter_has_tokens_accepted(results: dict[str, Any]) -> None:
    """In a text of n tokens, n - 1 rounds would have none."""
    for name, (lead, *_) in results.items():
        for kind in KINDS if "drafters" in name else ():
            cases = [found for case, found in lead["cases"].items() if case.split()[0] == kind]
            rounds = sum(found["rounds"] for found in cases)
            assert 0 < rounds < sum(len(found["tokens"]) - 1 for found in cases), (name, kind)


def test_texts_are_those_of_one_process(
    results: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Not in half precision, where split tensors are summed otherwise."""
    for name, (lead, *_) in results.items():
        if name == "half tensors":
            continue
        folder = save(name, tmp_path_factory.mktemp("one") / "target")
        model, tokenizer = mlx_lm.load(str(folder))
        tokenizer.eos_token_ids = None
        for case, found in lead["cases"].items() if name != "bigrams" else ():
            own = of_one_process(model, tokenizer, BASE | CASES[case])
            assert found["tokens"] == own, (name, case)


def test_every_rank_has_its_share_of_the_layers(results: dict[str, Any]) -> None:
    for name, ranks in results.items():
        size = TARGETS[name][2]
        layers = model_of(name).layers
        whole = sum(v.nbytes for layer in layers for _, v in tree_flatten(layer.parameters()))
        shares = [rank["bytes"] / whole for rank in ranks]
        assert sum(shares) == pytest.approx(1, abs=0.15), name  # norms are on all ranks
        assert all(0.8 / size < share < 1.3 / size for share in shares), (name, shares)


def chi_square(tokens: list[int], logits: np.ndarray) -> float:
    """Of the tokens that follow each other, in standard deviations from what it should be."""
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    counts = np.zeros_like(p)
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    expected = counts.sum(axis=1, keepdims=True) * p
    often = expected >= 2
    n = often.sum()
    assert n > 20
    found = ((counts - expected) ** 2 / expected)[often].sum()
    return (found - (1 - p[often]).sum()) / (2 * n) ** 0.5


def test_sampled_text_has_the_targets_distribution(results: dict[str, Any]) -> None:
    """Of a target whose next token depends on the last one alone: rank 0 draws, the others hear."""
    for lead, other in [results["bigrams"]] if "bigrams" in results else []:
        found = lead["cases"]["sampled"]
        tokens, (followed,) = found["tokens"], other["texts"]
        heard = followed["tokens"][3:]
        assert heard == tokens[: len(heard)]
        assert len(tokens) - len(heard) < 6  # those of the last round, at most
        assert found["rounds"] < 0.7 * len(tokens)
        model = model_of("bigrams")
        logits = np.array(model(mx.arange(SMALL["vocab_size"])[:, None])[:, 0])
        assert abs(chi_square(tokens, logits)) < 4
        assert max(chi_square(tokens, logits * k) for k in (0.5, 2)) > 5  # too hot, too cold


def test_all_ranks_multiply_by_what_rank_0_has_found(results: dict[str, Any]) -> None:
    for lead, other in [results["packed"]] if "packed" in results else []:
        layers = len(model_of("packed").layers)
        split = {
            "QuantizedAllToShardedLinear": 5 * layers,
            "QuantizedShardedToAllLinear": 2 * layers,
        }
        assert lead["swapped"] == other["swapped"] == split | {"QuantizedLinear": 1}
        assert lead["digest"] == other["digest"] != ""


def test_all_ranks_attend_to_quantised_caches_as_rank_0_has_found(results: dict[str, Any]) -> None:
    for ranks in [results["packed caches"]] if "packed caches" in results else []:
        lead, other = (rank["as heads"] for rank in ranks)
        assert lead == other > 0


def test_followers_run_one_forward_per_message(results: dict[str, Any]) -> None:
    """As many as rank 0: the prompt's, then one per round, or one per token while it is parked."""
    for name, (lead, *others) in results.items():
        if "parked" not in lead["cases"]:
            continue
        for followed in others:
            forwards = [text["forwards"] for text in followed["texts"]]
            cases = lead["cases"]
            assert forwards[0] == cases["greedy"]["rounds"] + 1, name
            assert forwards[1] == TOKENS + 1, name
            assert len(forwards) >= len(cases)
            for text in followed["texts"][:2]:
                assert text["tokens"][: len(PROMPT)] == PROMPT
                assert not text["failed"]
