"""Prompt caches that callers give: this model's are taken, another's are named."""

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.errors import InputError
from dspine_mlx.target.given_cache import Layout, check_given, target_layout
from dspine_mlx.target.prompt_cache import restored, stored
from dspine_mlx.target.rollback import leaves
from tests.support.each_family import EVERY_FAMILY
from tests.support.families import FAMILIES, WINDOW, build, random_drafter
from tests.support.tiny import plain_steps, random_prompt

LENGTHS = (1, 2, 9, WINDOW + 7)
WIDE = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


@cache
def known(family: str) -> tuple[nn.Module, Layout]:
    model = build(family)
    return model, target_layout(model)


def filled(model: nn.Module, rows: int, limit: int | None = None) -> list[Any]:
    caches = make_prompt_cache(model, limit)
    if rows:
        model(mx.array([random_prompt(rows)]), cache=caches)
        mx.eval([c.state for c in caches])
    return caches


def state(caches: list[Any]) -> list[Any]:
    """Whatever a forward would change."""
    return [
        [id(x) for x in c.cache]
        if isinstance(c, ArraysCache)
        else (id(c.keys), id(c.values), c.offset)
        for c in leaves(caches)
    ]


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_models_own_caches_are_taken(family: str) -> None:
    model, own = known(family)
    for rows in (0, *LENGTHS):
        caches = filled(model, rows)
        check_given(caches, own)
        check_given([restored(stored(c)) for c in caches], own)
        model(mx.array([random_prompt(3)]), cache=caches)
        check_given(caches, own)
    if not hasattr(model, "make_cache"):
        check_given(filled(model, 30, limit=16), own)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_another_familys_caches_are_named_and_left_alone(
    family: str, tokenizer: TokenizerWrapper
) -> None:
    """They are refused, or a forward of the family takes them: layouts can be the same."""
    model, own = known(family)
    tried, refused = 0, 0
    for other in FAMILIES:
        caches = filled(known(other)[0], 5)
        if other == family or len(caches) < len(own):
            continue
        tried += 1
        if refusal(caches, own) is None:
            mx.eval(model(mx.array([random_prompt(3)]), cache=caches))
            continue
        refused += 1
        before, drafter = state(caches), random_drafter(model)
        with pytest.raises(InputError, match="another model's"):
            dspine_mlx.stream_generate(model, tokenizer, [5], drafter, prompt_cache=caches)
        assert state(caches) == before
    assert bool(refused) == bool(tried)


def refusal(caches: list[Any], own: Layout) -> str | None:
    try:
        check_given(caches, own)
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "changes",
    [{"head_dim": 32}, {"num_key_value_heads": 4}, {"num_hidden_layers": 5}],
    ids=["head_dim", "heads", "layers"],
)
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("drafts", [False, True])
def test_sizes_of_the_same_family(
    tokenizer: TokenizerWrapper, changes: dict[str, int], bits: int | None, drafts: bool
) -> None:
    model = build("qwen3", **{"head_dim": 64})
    caches = filled(build("qwen3", **{"head_dim": 64} | changes), 5)
    if bits:
        caches = [c.to_quantized(32, bits) for c in caches]
    drafter, before = random_drafter(model) if drafts else None, len(caches)
    if "num_hidden_layers" in changes and not drafts:
        return  # a drafter's cache may come after the target's
    with pytest.raises(InputError, match="another model's|has 5 entries"):
        dspine_mlx.stream_generate(model, tokenizer, [5, 6], drafter, prompt_cache=caches)
    assert len(caches) == before


def test_another_drafters_caches(tokenizer: TokenizerWrapper) -> None:
    model = build("qwen3")
    wide = random_drafter(model, head_dim=32)
    caches = make_prompt_cache(model)
    for _ in dspine_mlx.stream_generate(
        model, tokenizer, [5, 6], wide, max_tokens=4, verify_length=2, prompt_cache=caches
    ):
        pass
    with pytest.raises(InputError, match=r"prompt_cache\[4\] has entries of .* drafter's are"):
        dspine_mlx.stream_generate(
            model, tokenizer, [5], random_drafter(model), prompt_cache=caches
        )


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "llama_sliding", "llama4", "rwkv7"])
def test_a_second_turn_is_as_without_a_check(family: str, tokenizer: TokenizerWrapper) -> None:
    """Also where the first one left quantised rows or states."""
    model, _ = known(family)
    options: dict[str, Any] = {}
    if family in ("qwen3", "qwen3_5"):
        model = build(family, **WIDE)
        options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 3}
    caches, plain = make_prompt_cache(model), make_prompt_cache(model)
    for prompt in ([5, 6, 7], [8], [9, 10]):
        wanted = plain_steps(model, tokenizer, prompt, max_tokens=3, prompt_cache=plain, **options)
        responses = dspine_mlx.stream_generate(
            model, tokenizer, prompt, random_drafter(model), max_tokens=3, prompt_cache=caches,
            verify_length=2, **options,
        )  # fmt: skip
        assert [r.token for r in responses] == [token for token, _ in wanted]
    assert KVCache in {type(c) for c in caches}
