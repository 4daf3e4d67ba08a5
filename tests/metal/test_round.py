"""Drafting with the kernels: the plain path's proposals and tokens, in the launches promised."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.dspark import DSpark, DSparkConfig
from dspine_mlx.drafters.dspine import DSpine, DSpineConfig
from dspine_mlx.load import DEMO
from dspine_mlx.metal.inject import GATED_MESSAGE, RESIDUAL_WRITE
from dspine_mlx.metal.kernel import Arrays, Kernel, Kernels
from dspine_mlx.metal.markov import MARKOV_SCORES
from dspine_mlx.metal.walk import walk
from dspine_mlx.target.model import Target
from tests.support.metal_device import KERNELS, METAL, emulator, needs_device
from tests.support.tiny import drafter_config, randomise

pytestmark = pytest.mark.slow

VIEWS = {  # primitives of a graph that launch nothing
    *("Slice", "Reshape", "Transpose", "Broadcast", "Squeeze", "ExpandDims"),
    *("Flatten", "Unflatten"),
}


@pytest.fixture(scope="module")
def demo() -> tuple[nn.Module, TokenizerWrapper]:
    model, tokenizer, _ = dspine_mlx.load(DEMO / "target")
    return model, tokenizer


def random_drafter(model: nn.Module, kernels: Kernels, **changes: Any) -> Drafter:
    """A DSpine drafter for the demo target, with codes of unit length."""
    target = Target(model)
    config = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": target.vocab_size,
        "block_size": 16,
        "mask_token_id": 3,
        "target_layer_ids": (1, 4),
        "transfer_rank": 64,
        "message_size": 32,
    } | changes
    network = randomise(DSpine(DSpineConfig.from_dict(config)), 7, 0.1)
    codes = network.transfer_codes
    codes.weight = codes.weight / mx.linalg.norm(codes.weight, axis=-1, keepdims=True)
    network.set_dtype(target.dtype)
    mx.eval(network.parameters())
    return network.bind(target, kernels)


def active(cls: type[Kernels] = Kernels) -> Kernels:
    kernels = cls("auto")
    kernels.active = True
    return kernels


@contextmanager
def emulated() -> Iterator[Counter[str]]:
    """Within it kernels run, on Metal or by the emulator; counts their launches."""
    launched: Counter[str] = Counter()
    functions = {kernel: kernel.function for kernel in KERNELS}

    def count(kernel: Kernel, run: Any, **call: Any) -> Arrays:
        launched[kernel.name] += 1
        return run(**call)

    try:
        for kernel in KERNELS:
            run = kernel.function if METAL else emulator(kernel)
            if not METAL:
                emulator(kernel).check, emulator(kernel).order = False, 0
            kernel.function = partial(count, kernel, run)
        yield launched
    finally:
        for kernel, function in functions.items():
            kernel.function = function


@needs_device
def test_proposals_are_those_of_the_plain_path() -> None:
    """In float32, for three blocks one after the other on the same caches."""
    model, _, _ = dspine_mlx.load(DEMO / "target")
    model.set_dtype(mx.float32)
    plain, fused = random_drafter(model, Kernels("off")), random_drafter(model, active())
    caches = plain.make_cache(), fused.make_cache()
    for n in (5, 3, 0):
        features = mx.random.normal((1, n, plain.network.feature_size)) * 3
        one = plain.propose(11, features, caches[0]).ranked()
        with emulated():
            two = fused.propose(11, features, caches[1]).ranked()
        assert two.candidates.tolist() == one.candidates.tolist()
        np.testing.assert_allclose(np.array(two.first), np.array(one.first), atol=1e-4)
        np.testing.assert_allclose(np.array(two.transitions), np.array(one.transitions), atol=1e-4)
    assert all(check.runs for check in fused.kernels.checks.values())


PROBLEMS = (
    "Ali has 52 bottle caps. 17 are red and the rest are green. What percent of them are green?",
    "Tom has 3 boxes of 12 pencils and gives 7 to each of 4 friends. How many are left?",
    "A bakery sells 30 cakes a day at $4 each. How much money does it make in 7 days?",
)


def answers(
    model: nn.Module, tokenizer: TokenizerWrapper, drafter: Drafter
) -> tuple[list[int], int, int]:
    """Tokens, rounds and accepted tokens of all problems."""
    tokens, rounds, accepted = [], 0, 0
    for problem in PROBLEMS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem}], add_generation_prompt=True
        )
        for response in dspine_mlx.stream_generate(
            model, tokenizer, prompt, drafter, max_tokens=50, verify_length=15
        ):
            tokens.append(response.token)
        rounds += response.rounds
        accepted += response.accepted
    return tokens, rounds, accepted


@needs_device
def test_text_is_the_same_with_and_without_kernels() -> None:
    """The pair that ships, more than 100 tokens; every kernel serves its sizes."""
    model, tokenizer, plain = dspine_mlx.load(kernels="off")
    assert plain is not None
    fused = dspine_mlx.load_drafter(DEMO / "drafter", model, kernels="off")
    fused = fused.network.bind(fused.target, active())
    wanted, rounds, accepted = answers(model, tokenizer, plain)
    with emulated() as launched:
        got, fused_rounds, fused_accepted = answers(model, tokenizer, fused)
    assert len(got) > 100
    if not METAL:  # on a GPU the target itself may round otherwise for other numbers of rows
        assert got == wanted
        assert abs(fused_rounds - rounds) <= 2  # float16: near ties of a draft may fall otherwise
        assert abs(fused_accepted - accepted) <= 10
    checks = list(fused.kernels.checks.values())
    assert all(c.runs for c in checks)
    for kernel in KERNELS:
        first_uses = sum(c.kernel == kernel.name for c in checks)
        per_round = len(fused.layers) if kernel in (GATED_MESSAGE, RESIDUAL_WRITE) else 1
        assert launched[kernel.name] == fused_rounds * per_round + first_uses
        assert METAL or emulator(kernel).copies == 0


class Trusting(Kernels):
    """Runs every kernel unchecked: while a graph is recorded nothing can be evaluated."""

    def run(self, kernel: Kernel, *args: Any) -> Arrays:
        return kernel.launch(*args)


def launches(monkeypatch: pytest.MonkeyPatch, function: Any, *arrays: mx.array) -> Counter[str]:
    """What a call launches, from the graph MLX exports."""
    for kernel in (*KERNELS, MARKOV_SCORES):
        monkeypatch.setattr(kernel, "function", partial(kernel.function, stream=mx.gpu))
    found: Counter[str] = Counter()

    def record(event: dict[str, Any]) -> None:
        if event["type"] == "primitive" and event["name"] not in VIEWS:
            found[event["name"]] += 1

    mx.export_function(record, function, *arrays)
    return found


def test_injection_takes_five_launches_a_layer(
    demo: tuple[nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = random_drafter(demo[0], active(Trusting))
    dtype, size = drafter.target.dtype, drafter.config.hidden_size
    block, anchor = mx.zeros((16, size), dtype), mx.zeros((64,), dtype)
    inject = partial(drafter.network.inject, kernels=drafter.kernels)
    found = launches(monkeypatch, lambda b, a: list(inject(0, b, a)), block, anchor)
    assert found == {"Matmul": 3, "CustomKernel": 2}


def test_injection_from_two_slots_back_takes_seven_launches_a_layer(
    demo: tuple[nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = random_drafter(demo[0], active(Trusting), injection_reach=2)
    dtype, size = drafter.target.dtype, drafter.config.hidden_size
    block, codes = mx.zeros((16, size), dtype), mx.zeros((2, 64), dtype)
    inject = partial(drafter.network.inject_earlier, kernels=drafter.kernels)
    found = launches(monkeypatch, lambda b, c: [inject(0, b, c)], block, codes)
    assert found == {"Matmul": 3, "CustomKernel": 2, "Full": 1, "Concatenate": 1}


def test_table_and_walk_take_at_most_five_launches(
    demo: tuple[nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = random_drafter(demo[0], active(Trusting))
    dtype, size, K = drafter.target.dtype, drafter.config.hidden_size, 16

    def table_and_walk(
        u: mx.array, receiver: mx.array, candidates: mx.array, first: mx.array
    ) -> list[mx.array]:
        table = drafter.network.transition_table(
            u, receiver, candidates[:-1], candidates[1:], drafter.target, drafter.kernels
        )
        no_noise = mx.broadcast_to(mx.array(0.0), (15, K))
        return list(walk(first, table, no_noise, 1.0, drafter.kernels))

    found = launches(
        monkeypatch,
        table_and_walk,
        mx.zeros((14, size), dtype),
        mx.zeros((14, 32), dtype),
        mx.zeros((15, K), mx.uint32),
        mx.zeros((K,)),
    )
    assert found == {"Matmul": 1, "CustomKernel": 3}


def test_codes_are_folded_with_their_gates_for_kernels_only(demo: tuple[nn.Module, Any]) -> None:
    plain, fused = random_drafter(demo[0], Kernels("off")), random_drafter(demo[0], active())
    tokens = mx.array([[0, 5], [2047, 9]])
    assert "transfer_codes" in plain.network
    assert "transfer_codes" not in fused.network
    one, two = (d.network.code_rows(tokens).take() for d in (plain, fused))
    np.testing.assert_allclose(np.array(one), np.array(two), atol=2e-3)
    earlier = random_drafter(demo[0], active(), injection_reach=2).network
    assert {"folded_codes", "transfer_codes"} <= earlier.keys()  # its anchor has gates of its own


@pytest.mark.parametrize(("kind", "launched"), [("vanilla", 1), ("gated", None)])
def test_a_vanilla_markov_table_takes_one_launch(
    monkeypatch: pytest.MonkeyPatch, kind: str, launched: int | None
) -> None:
    config = drafter_config(markov_rank=16, markov_head_type=kind, first_slot=0)
    network, kernels = DSpark(DSparkConfig.from_dict(config)), active(Trusting)
    mx.eval(network.parameters())
    M, K, d = 8, 4, network.config.hidden_size
    tokens = mx.zeros((M, K), mx.uint32)

    def table(base: mx.array, before: mx.array, ids: mx.array, states: mx.array) -> list[mx.array]:
        return [network.markov_table(base, before, ids, states, kernels)]

    found = launches(monkeypatch, table, mx.zeros((M, K)), tokens, tokens, mx.zeros((M, d)))
    assert found["CustomKernel"] == (launched or 0)
    assert (found.total() == 1) == (launched == 1)
