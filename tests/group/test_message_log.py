"""A follower that hears a recorded text ends with rank 0's caches, bit for bit."""

from contextlib import closing
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.generate import stream_generate
from dspine_mlx.group.no_drafter import NoDrafter
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.target.prompt_cache import PromptCaches
from tests.support.drafters import EVERY
from tests.support.each_family import KINDS, slow
from tests.support.families import build, drafter_config
from tests.support.message_log import Recorded, lead, replay
from tests.support.tiny import SCRIPTS, Scripted, plain_steps, random_prompt

FAMILIES = ("qwen3", "qwen3_moe", "llama_sliding", "qwen3_5", "gemma3_text", "falcon_h1")
PROMPT, TOKENS = random_prompt(40), 30


def same_states(a: list[Any], b: list[Any]) -> bool:
    return all(
        mx.array_equal(x, y).item() if isinstance(x, mx.array) else x == y
        for one, other in zip(a, b, strict=True)
        for (_, x), (_, y) in zip(tree_flatten(one.state), tree_flatten(other.state), strict=True)
    )


def plain_text(model: nn.Module, tokenizer: TokenizerWrapper, **options: Any) -> list[int]:
    steps = plain_steps(model, tokenizer, PROMPT, max_tokens=TOKENS, **options)
    return [token for token, _ in steps]


def scripted(model: nn.Module, text: list[int]) -> tuple[Scripted, Recorded]:
    """A drafter of rank 0 that is right now and then, and the record of its messages."""
    target, channel = lead(model)
    network = DFlash(drafter_config(model))
    return Scripted(network, target, target, text=text, script=SCRIPTS["now and then"]), channel


@pytest.mark.parametrize(
    ("family", "length"),
    [(family, length) for family in KINDS for length in (0, 3, 7)]
    + [slow(family, 3) for family in FAMILIES if family not in KINDS],
)
def test_a_follower_has_the_same_caches(
    family: str, length: int, tokenizer: TokenizerWrapper
) -> None:
    model = build(family)
    plain = plain_text(model, tokenizer)
    drafter, channel = scripted(model, PROMPT + plain)
    cache = make_prompt_cache(model)
    options = {"max_tokens": TOKENS, "prompt_cache": cache, "verify_length": length}
    responses = list(
        stream_generate(model, tokenizer, PROMPT, drafter, prefill_step_size=16, **options)
    )
    assert [r.token for r in responses] == plain

    own = make_prompt_cache(model)
    followed, replayed = replay(build(family), channel, own)
    assert not replayed.left
    assert followed.tokens == PROMPT + plain
    assert followed.forwards == len(channel.heads) - 1  # the last message ends the text
    assert same_states(own, cache[: len(own)])
    more = sum(more for *_, more in channel.heads)
    assert more == (TOKENS - 1 if length == 0 else 0)
    assert len(channel.heads) < 3 + TOKENS or length == 0


@pytest.mark.parametrize("kind", EVERY)
def test_drafters_of_every_kind(kind: str, tokenizer: TokenizerWrapper) -> None:
    """With a seed and a processor, in a vocabulary so small that random weights are right at
    times."""
    model = build("qwen3_5", vocab_size=16)
    prompt = [4 + token % 12 for token in PROMPT]
    options: dict[str, Any] = {
        "max_tokens": TOKENS,
        "logits_processors": [lambda tokens, logits: logits - 1e9 * (mx.arange(16) == tokens[-1])],
        "sampler": Sampler(temp=0.8, seeded=True),
    }
    mx.random.seed(5)
    plain = [token for token, _ in plain_steps(model, tokenizer, prompt, **options)]
    target, channel = lead(model)
    sizes = {"hidden_size": target.hidden_size, "vocab_size": 16}
    drafter = EVERY[kind](model, **sizes).network.bind(target)
    cache = make_prompt_cache(model)
    mx.random.seed(5)
    responses = stream_generate(
        model, tokenizer, prompt, drafter, prompt_cache=cache, verify_length=5, **options
    )
    assert [r.token for r in responses] == plain

    own = make_prompt_cache(model)
    followed, replayed = replay(build("qwen3_5", vocab_size=16), channel, own)
    assert not replayed.left
    assert followed.tokens == prompt + plain
    assert same_states(own, cache[: len(own)])


@pytest.mark.parametrize("length", [0, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 44},
        {"max_kv_size": 24},
        {"sampler": Sampler(temp=0.8, seeded=True)},
    ],
    ids=["quantised from row 44", "a window that wraps", "seeded"],
)
def test_the_same_with_options(
    options: dict[str, Any], length: int, tokenizer: TokenizerWrapper
) -> None:
    model = build("qwen3", head_dim=32)
    window = options.get("max_kv_size")
    mx.random.seed(5)
    plain = plain_text(model, tokenizer, **options)
    drafter, channel = scripted(model, PROMPT + plain)
    cache = make_prompt_cache(model, window)
    mx.random.seed(5)
    given = {k: v for k, v in options.items() if k != "max_kv_size"}
    responses = stream_generate(
        model,
        tokenizer,
        PROMPT,
        drafter,
        max_tokens=TOKENS,
        verify_length=length,
        prompt_cache=cache,
        **given,
    )
    assert [r.token for r in responses] == plain

    own = make_prompt_cache(model, channel.jobs[0]["max_kv_size"])
    assert channel.jobs[0]["max_kv_size"] == window
    followed, _ = replay(build("qwen3", head_dim=32), channel, own)
    assert followed.tokens == PROMPT + plain
    assert same_states(own, cache[: len(own)])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "llama_sliding"])
@pytest.mark.parametrize("length", [0, 4])
@pytest.mark.parametrize("taken", [1, 2, 9])
def test_a_text_that_is_left_early(
    family: str, length: int, taken: int, tokenizer: TokenizerWrapper
) -> None:
    """The forward that was announced, and is not wanted any more, leaves nothing."""
    model = build(family)
    plain = plain_text(model, tokenizer)
    drafter, channel = scripted(model, PROMPT + plain)
    cache = make_prompt_cache(model)
    options = {"max_tokens": TOKENS, "prompt_cache": cache, "verify_length": length}
    with closing(stream_generate(model, tokenizer, PROMPT, drafter, **options)) as responses:
        assert [r.token for r in islice(responses, taken)] == plain[:taken]

    own = make_prompt_cache(model)
    followed, replayed = replay(build(family), channel, own)
    assert not replayed.left
    assert not followed.failed
    assert followed.tokens == PROMPT + plain[:taken]
    assert same_states(own, cache[: len(own)])


def test_a_text_without_a_drafter(tokenizer: TokenizerWrapper) -> None:
    """Plain decoding with processors and a seed is mlx-lm's, and the follower keeps up."""

    def no_even(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits - 1e9 * (mx.arange(logits.shape[-1]) % 2 == 0)

    model = build("qwen3")
    options: dict[str, Any] = {
        "sampler": Sampler(temp=1.0, seeded=True),
        "logits_processors": [no_even],
    }
    mx.random.seed(1)
    plain = plain_text(model, tokenizer, **options)
    target, channel = lead(model)
    cache = make_prompt_cache(model)
    mx.random.seed(1)
    responses = stream_generate(
        model, tokenizer, PROMPT, NoDrafter(target), max_tokens=TOKENS, prompt_cache=cache,
        verify_length=0, **options,
    )  # fmt: skip
    assert [r.token for r in responses] == plain
    own = make_prompt_cache(model)
    followed, _ = replay(build("qwen3"), channel, own)
    assert followed.tokens == PROMPT + plain
    assert same_states(own, cache)


def test_an_error_of_the_users_code(tokenizer: TokenizerWrapper) -> None:
    """A forward may have been announced on top of one that is dropped: the follower is told that
    its caches are of no use."""
    calls = []

    def fails(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append(tokens.size)
        if len(calls) == 6:
            raise ZeroDivisionError
        return logits

    model = build("qwen3")
    target, channel = lead(model)
    cache = make_prompt_cache(model)
    with pytest.raises(ZeroDivisionError):
        list(
            stream_generate(
                model,
                tokenizer,
                PROMPT,
                NoDrafter(target),
                prompt_cache=cache,
                verify_length=0,
                logits_processors=[fails],
            )  # fmt: skip
        )
    followed, replayed = replay(build("qwen3"), channel, make_prompt_cache(model))
    assert not replayed.left
    assert followed.failed
    assert cache[0].offset == len(PROMPT) + 4


def test_copies_of_a_prompts_caches_are_made_at_the_same_places(
    tokenizer: TokenizerWrapper,
) -> None:
    model = build("qwen3_5")
    plain = plain_text(model, tokenizer)
    drafter, channel = scripted(model, PROMPT + plain)
    stops = [PROMPT[10], PROMPT[25]]
    ours, theirs = PromptCaches(), PromptCaches()
    options = {"max_tokens": TOKENS, "verify_length": 4, "prompt_cache": make_prompt_cache(model)}
    places = ours.checkpoints("", PROMPT, PROMPT, stops)
    list(
        stream_generate(
            model, tokenizer, PROMPT, drafter, prompt_checkpoints=places, **options
        )  # fmt: skip
    )
    own = make_prompt_cache(model)
    replay(
        build("qwen3_5"), channel, own, checkpoints=theirs.checkpoints("", PROMPT, PROMPT, stops)
    )
    for end in (11, 26):
        mine, rest = ours.fetch_nearest_cache("", [*PROMPT[:end], 7])
        other, other_rest = theirs.fetch_nearest_cache("", [*PROMPT[:end], 7])
        assert rest == other_rest == [7]
        assert mine is not None
        assert other is not None
        assert same_states(mine[: len(own)], other)
