"""Caches of several texts, in ragged rounds, against each text fed one row at a time."""

import copy
import random
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from dspine_mlx.batch.rows import Lengths, RingKV
from dspine_mlx.batch.target_rows import FAMILIES as BATCHED
from dspine_mlx.batch.target_rows import TargetRows, refusal
from tests.support.families import FAMILIES, WINDOW, build
from tests.support.tiny import random_prompt

WIDEST = 5
WINDOWED = ("llama_sliding", "olmo3", "gemma3_text", "gemma3", "gemma4_text", "gemma4", "gpt_oss")
# One text's own forward over several rows differs from rows fed one by one here, too.
ROUNDED = ("nemotron_h", "falcon_h1", "granitemoehybrid", "mamba2", "kimi_linear")
EXACT = ("qwen2", "qwen3", "qwen3_tied", "qwen3_moe", "llama", "qwen3_5", "qwen3_5_wrapped",
         "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "lfm2", "lfm2_moe")  # fmt: skip
REFUSED = ("llama4", "rwkv7", "recurrent_gemma", "jamba")


def test_every_family_is_batched_or_refused() -> None:
    assert {*WINDOWED, *ROUNDED, *EXACT, *REFUSED} == set(FAMILIES)
    kinds = {FAMILIES[name].get("model_type", name) for name in {*WINDOWED, *ROUNDED, *EXACT}}
    assert kinds == BATCHED


@dataclass
class Alone:
    """A text decoded by itself, row by row."""

    model: nn.Module
    cache: list[Any]
    length: int

    @classmethod
    def prefilled(cls, model: nn.Module, prompt: list[int]) -> "Alone":
        cache = make_prompt_cache(model)
        if prompt:
            model(mx.array([prompt]), cache=cache)
        mx.eval([c.state for c in cache])
        return cls(model, cache, len(prompt))

    def feed(self, tokens: list[int], accepted: int) -> mx.array:
        """Logits [n, V] of rows fed one at a time; the first `accepted` stay in the caches."""
        rows = []
        for j, token in enumerate(tokens):
            if j == accepted:
                self.cache, kept = copy.deepcopy(self.cache), self.cache
            rows.append(self.model(mx.array([[token]]), cache=self.cache)[0])
        if accepted < len(tokens):
            self.cache = kept
        self.length += accepted
        return mx.concatenate(rows)


def ragged_round(
    rows: TargetRows, texts: list[Alone], draw: random.Random
) -> list[tuple[mx.array, mx.array]]:
    """One forward over all texts and a rollback of its own for each; rows batched and alone."""
    width = draw.randint(1, WIDEST)
    fed = [[draw.randrange(4, 2048) for _ in range(width)] for _ in texts]
    with rows.verifying(width):
        logits = rows_model(texts)(mx.array(fed), cache=rows.caches)
    mx.eval(logits)
    accepted = [draw.randint(1, width) for _ in texts]
    rows.accept(accepted)
    each = zip(texts, fed, accepted, strict=True)
    return [(logits[i], text.feed(tokens, n)) for i, (text, tokens, n) in enumerate(each)]


def rows_model(texts: list[Alone]) -> nn.Module:
    return texts[0].model


def close(ours: mx.array, alone: mx.array) -> bool:
    same = mx.array_equal(mx.argmax(ours, axis=-1), mx.argmax(alone, axis=-1))
    return bool(mx.allclose(ours, alone, rtol=0, atol=1e-4).item() and same.item())


def compare(ours: mx.array, alone: mx.array, exact: bool) -> bool:
    return mx.array_equal(ours, alone).item() if exact else close(ours, alone)


@pytest.mark.parametrize("family", [*EXACT, *WINDOWED, *ROUNDED])
def test_rows_of_ragged_rounds_are_those_of_texts_alone(family: str) -> None:
    """Three texts of different lengths, one of them joining later and one leaving early; who leaves
    goes on alone. Windows overflow in the last rounds, where keys are summed in another order."""
    model, draw = build(family), random.Random(family)
    texts = [Alone.prefilled(model, random_prompt(n, seed=n)) for n in (3, 6, 1)]
    rows = TargetRows(model, make_prompt_cache(model), WIDEST)
    for text in texts[:2]:
        rows.join(copy.deepcopy(text.cache))

    def short() -> bool:
        return max(text.length for text in texts) + WIDEST <= WINDOW

    exact = family not in ROUNDED
    for turn in range(8 if family in WINDOWED else 4):
        if turn == 1:
            rows.join(copy.deepcopy(texts[2].cache))
        inside = short() or family not in WINDOWED
        pairs = ragged_round(rows, texts[: len(rows.lengths.host)], draw)
        assert all(compare(ours, alone, exact and inside) for ours, alone in pairs), turn
    own = rows.extract(0)
    assert [type(c) for c in own] == [type(c) for c in texts[0].cache]
    rows.keep([2, 1])
    staying = [texts[2], texts[1]]
    pairs = ragged_round(rows, staying, draw)
    assert all(compare(ours, alone, exact and family not in WINDOWED) for ours, alone in pairs)
    token = mx.array([[7]])
    assert compare(
        model(token, cache=own)[0],
        model(token, cache=texts[0].cache)[0],
        exact and family not in WINDOWED,
    )


def test_a_text_without_keys_joins_and_is_joined() -> None:
    """A prompt of one token has nothing in its caches."""
    for family in ("qwen3", "qwen3_5", "gemma3_text"):
        model, draw = build(family), random.Random(1)
        for lengths in ((0, 0, 4), (4, 0), (0, 4)):
            texts = [Alone.prefilled(model, random_prompt(n) if n else []) for n in lengths]
            rows = TargetRows(model, make_prompt_cache(model), WIDEST)
            for text in texts:
                rows.join(copy.deepcopy(text.cache))
            for ours, alone in ragged_round(rows, texts, draw):
                assert mx.array_equal(ours, alone), (family, lengths)


def test_joining_moves_what_the_own_caches_held() -> None:
    model = build("gemma3_text")
    text = Alone.prefilled(model, random_prompt(9))
    rows = TargetRows(model, make_prompt_cache(model), WIDEST)
    rows.join(text.cache)
    assert all(c.empty() and c.offset == 0 for c in text.cache)
    assert rows.lengths.host == [9]
    assert [c.offset for c in rows.extract(0)] == [9] * len(text.cache)


def test_a_ring_holds_exactly_the_window_of_each_row() -> None:
    """Positions as keys: each row must see those of its window and no stale one, at any widths and
    rollbacks."""
    window, widest, draw = 6, 4, random.Random(3)
    lengths = Lengths()
    ring = RingKV(lengths, window, widest)
    for length in (2, 11):
        cache = RotatingKVCache(window)
        position = mx.arange(length, dtype=mx.float32).reshape(1, 1, -1, 1)
        cache.update_and_fetch(position, position)
        ring.join(cache)
        lengths.replace([*lengths.host, length])
    for _ in range(30):
        width = draw.randint(1, widest)
        mask = ring.make_mask(width)
        position = lengths.following(width).astype(mx.float32)[:, None, :, None]
        keys, _ = ring.update_and_fetch(position, position)
        for i, length in enumerate(lengths.host):
            for j in range(width):
                seen = sorted(
                    int(k)
                    for k, visible in zip(
                        keys[i, 0, :, 0].tolist(), mask[i, 0, j].tolist(), strict=True
                    )
                    if visible
                )
                newest = length + j
                assert seen == list(range(max(0, newest - window + 1), newest + 1))
        lengths.advance([draw.randint(1, width) for _ in lengths.host])


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused_by_name(family: str) -> None:
    model = build(family)
    assert refusal(model, make_prompt_cache(model)) == (
        f"{family} models decode one text at a time here"
    )


def test_caches_of_a_limited_size_are_refused() -> None:
    model = build("qwen3")
    assert refusal(model, make_prompt_cache(model)) is None
    assert "max_kv_size" in (refusal(model, make_prompt_cache(model, max_kv_size=64)) or "")
    assert "QuantizedKVCache" in (refusal(model, [KVCache().to_quantized()]) or "")
