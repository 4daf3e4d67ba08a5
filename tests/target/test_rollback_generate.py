"""Drafted text of every family against mlx-lm's; caches in files, quantised, limited and reused."""

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    QuantizedKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.target.prompt_cache import PromptCaches
from dspine_mlx.target.rollback import leaves
from dspine_mlx.verify_length.profile import StepTimer
from tests.support.each_family import IN_BITS, slow
from tests.support.families import FAMILIES, WINDOW, build, random_drafter, scripted_drafter
from tests.support.tiny import SCRIPTS, random_prompt

HYBRIDS = ["qwen3_5", "nemotron_h", "falcon_h1", "lfm2", "jamba"]
model_of = cache(build)


def plain_tokens(
    model: nn.Module, tokenizer: TokenizerWrapper, prompt: list[int], **options: Any
) -> list[int]:
    return [r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, **options)]


def drafted(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: list[int],
    drafter: Drafter,
    **options: Any,
) -> list[int]:
    """Tokens of rounds with whole blocks, whether they pay or not."""
    options = {"verify_length": drafter.config.num_proposals} | options
    responses = list(dspine_mlx.stream_generate(model, tokenizer, prompt, drafter, **options))
    assert responses[-1].rounds > 0
    return [r.token for r in responses]


@pytest.mark.parametrize(("family", "bits"), IN_BITS)
def test_greedy_text_is_mlx_lms(tokenizer: TokenizerWrapper, family: str, bits: int | None) -> None:
    """The text runs past the window; drafters know the text and spoil it, or know nothing."""
    model = model_of(family, bits)
    prompt = random_prompt(WINDOW - 7)
    plain = plain_tokens(model, tokenizer, prompt, max_tokens=20)
    scripts = list(SCRIPTS)
    script = scripts[(list(FAMILIES).index(family) + (bits or 0)) % len(scripts)]
    drafters: list[Drafter] = [scripted_drafter(model, prompt + plain, script, block_size=16)]
    if bits is None and family in HYBRIDS:
        drafters.append(random_drafter(model, block_size=4))
    for drafter in drafters:
        assert drafted(model, tokenizer, prompt, drafter, max_tokens=20) == plain


@pytest.mark.parametrize("taken", [slow(1), 4])
@pytest.mark.parametrize("family", [*HYBRIDS, "gpt_oss", "llama4"])
def test_second_turn_after_an_early_close(
    tokenizer: TokenizerWrapper, family: str, taken: int
) -> None:
    """Closing between verification and the next round leaves the caches at the yielded text."""
    model = model_of(family)
    prompt, more = random_prompt(WINDOW), random_prompt(5, seed=9)
    first = plain_tokens(model, tokenizer, prompt, max_tokens=12)
    conversation = prompt + first[:taken] + more
    second = plain_tokens(model, tokenizer, conversation, max_tokens=12)
    prompt_cache = make_prompt_cache(model)
    drafter = scripted_drafter(model, prompt + first, "now and then")
    options = {"prompt_cache": prompt_cache, "max_tokens": 12, "verify_length": 7}
    generator = dspine_mlx.stream_generate(model, tokenizer, prompt, drafter, **options)
    assert [next(generator).token for _ in range(taken)] == first[:taken]
    generator.close()
    drafter.text = conversation + second
    assert drafted(model, tokenizer, more, drafter, **options) == second


@pytest.mark.parametrize("family", HYBRIDS)
def test_two_generators_on_one_model(tokenizer: TokenizerWrapper, family: str) -> None:
    model = model_of(family)
    prompts = [random_prompt(9), random_prompt(14, seed=5)]
    plain = [plain_tokens(model, tokenizer, prompt, max_tokens=20) for prompt in prompts]
    types = [type(m) for m in model.modules()]
    generators = [
        dspine_mlx.stream_generate(
            model,
            tokenizer,
            prompt,
            scripted_drafter(model, prompt + text, "now and then"),
            max_tokens=20,
            verify_length=7,
        )
        for prompt, text in zip(prompts, plain, strict=True)
    ]
    pairs = list(zip(*generators, strict=False))
    assert [[r.token for r in turn] for turn in zip(*pairs, strict=True)] == plain
    assert [type(m) for m in model.modules()] == types


class Cancelled(Exception):
    pass


@pytest.mark.parametrize("family", ["qwen3_5", "gpt_oss", "jamba"])
def test_a_cancelled_prefill_leaves_what_was_done(tokenizer: TokenizerWrapper, family: str) -> None:
    model = model_of(family)
    prompt = random_prompt(40)
    plain = plain_tokens(model, tokenizer, prompt, max_tokens=10)
    prompt_cache = make_prompt_cache(model)

    def progress(done: int, total: int) -> None:
        if done == 30:
            raise Cancelled

    drafter = random_drafter(model)
    options: dict[str, Any] = {"prompt_cache": prompt_cache, "prefill_step_size": 10}
    with pytest.raises(Cancelled):
        drafted(model, tokenizer, prompt, drafter, prompt_progress_callback=progress, **options)
    assert drafted(model, tokenizer, prompt[30:], drafter, max_tokens=10, **options) == plain


class Broken:
    """A processor that fails at its nth row."""

    def __init__(self, n: int):
        self.left = n

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.left -= 1
        if self.left == 0:
            raise Cancelled
        return logits


@pytest.mark.parametrize("n", [slow(1), 11])
@pytest.mark.parametrize("family", ["qwen3_5", "gpt_oss", "jamba", "falcon_h1"])
def test_an_exception_between_verify_and_accept(
    tokenizer: TokenizerWrapper, family: str, n: int
) -> None:
    """The text goes on from the caches as if the round had never been."""
    model = model_of(family)
    types = [type(m) for m in model.modules()]
    prompt, more = random_prompt(WINDOW), random_prompt(3, seed=4)
    plain = plain_tokens(model, tokenizer, prompt, max_tokens=24)
    drafter = scripted_drafter(model, prompt + plain, "now and then")
    prompt_cache = make_prompt_cache(model)
    seen: list[int] = []
    responses = dspine_mlx.stream_generate(
        model,
        tokenizer,
        prompt,
        drafter,
        prompt_cache=prompt_cache,
        verify_length=7,
        logits_processors=[Broken(n)],
    )
    with pytest.raises(Cancelled):
        seen.extend(r.token for r in responses)
    assert seen == plain[: len(seen)]
    assert [type(m) for m in model.modules()] == types
    text = prompt + seen + more
    options = {"prompt_cache": prompt_cache, "max_tokens": 8}
    ours = drafted(model, tokenizer, more, random_drafter(model), **options)
    assert ours == plain_tokens(model, tokenizer, text, max_tokens=8)


@pytest.mark.parametrize("family", [*HYBRIDS, "gpt_oss"])
def test_a_measured_verify_step_pays_for_the_rollback(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost curve's verify step replays half of its rows, and leaves the caches as they were."""
    model = model_of(family)
    bench = StepTimer(random_drafter(model))
    accepted: list[int] = []
    accept = bench.rollback.accept

    def counted(rows: int) -> None:
        accepted.append(rows)
        accept(rows)

    monkeypatch.setattr(bench.rollback, "accept", counted)
    position = bench.rollback.position
    states = [list(c.cache) for c in leaves(bench.cache) if type(c) is ArraysCache]
    for width in (1, 2, 5, 8):
        bench.verify(width)
        bench.rollback.checkpoint()
    assert accepted == [1, 0, 1, 0, 3, 0, 4, 0]
    assert bench.rollback.position == position + 8
    after = [list(c.cache) for c in leaves(bench.cache) if type(c) is ArraysCache]
    assert all(
        a is b for x, y in zip(states, after, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("kind", ["right", "wrong", "now and then"])
@pytest.mark.parametrize("size", [8, 20])
def test_max_kv_size_with_drafting(tokenizer: TokenizerWrapper, size: int, kind: str) -> None:
    """The limit is reached in the prompt, in the text, and inside a block."""
    model = model_of("qwen3")
    prompt = random_prompt(12)
    options = {"max_tokens": 30, "max_kv_size": size}
    plain = plain_tokens(model, tokenizer, prompt, **options)
    assert plain != plain_tokens(model, tokenizer, prompt, max_tokens=30)
    drafter = scripted_drafter(model, prompt + plain, kind)
    assert drafted(model, tokenizer, prompt, drafter, **options) == plain


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "nemotron_h"])
@pytest.mark.parametrize("start", [0, 17])
def test_kv_bits_on_hybrids(tokenizer: TokenizerWrapper, family: str, start: int) -> None:
    """Attention layers are quantised where mlx-lm does it, recurrent ones stay."""
    wide = {"head_dim": 32, "hidden_size": 128, "block_dim": 128}
    changes = {k: v for k, v in wide.items() if k != "block_dim" or family == "lfm2"}
    model = model_of(family, **changes)
    prompt = random_prompt(14)
    options: dict[str, Any] = {
        "max_tokens": 20,
        "kv_bits": 8,
        "kv_group_size": 32,
        "quantized_kv_start": start,
    }
    plain = plain_tokens(model, tokenizer, prompt, **options)
    prompt_cache = make_prompt_cache(model)
    drafter = scripted_drafter(model, prompt + plain, "now and then")
    assert drafted(model, tokenizer, prompt, drafter, prompt_cache=prompt_cache, **options) == plain
    kinds = {type(c) for c in prompt_cache[: -len(drafter.layers)]}
    assert kinds == {ArraysCache, QuantizedKVCache}


@pytest.mark.parametrize("options", [{}, {"max_kv_size": 64}])
def test_kv_bits_on_rotating_caches_is_refused(
    tokenizer: TokenizerWrapper, options: dict[str, int]
) -> None:
    model = model_of("qwen3" if options else "gpt_oss")
    with pytest.raises(InputError, match="kv_bits is 4, but mlx-lm can't quantise rotating"):
        drafted(model, tokenizer, [5, 6], random_drafter(model), kv_bits=4, **options)


def test_an_unknown_cache_is_refused_before_the_first_token(tokenizer: TokenizerWrapper) -> None:
    class Novel(KVCache):
        pass

    model = model_of("qwen3")
    prompt_cache = [Novel() for _ in model.layers]
    with pytest.raises(InputError, match="can't roll back Novel"):
        drafted(model, tokenizer, [5, 6], random_drafter(model), prompt_cache=prompt_cache)
    assert all(c.empty() for c in prompt_cache)


@pytest.mark.parametrize("bits", [None, slow(8)])
@pytest.mark.parametrize(
    "family", ["qwen3_5", slow("falcon_h1"), slow("lfm2"), "jamba", "gpt_oss", slow("llama4"),
               "qwen3"],
)  # fmt: skip
def test_a_prompt_cache_from_a_file(
    tokenizer: TokenizerWrapper, tmp_path: Path, family: str, bits: int | None
) -> None:
    """What mlx_lm.cache_prompt writes, used with a drafter that has not seen the prompt."""
    if bits and family != "qwen3":
        pytest.skip("kv_bits of hybrids is tested above")
    model = model_of(family, **({"head_dim": 32} if bits else {}))
    prompt, more = random_prompt(WINDOW + 10), random_prompt(6, seed=4)
    options = {"kv_bits": bits, "quantized_kv_start": 0, "kv_group_size": 32} if bits else {}
    made = make_prompt_cache(model)
    # cache_prompt feeds the whole prompt and drops the token that follows.
    feed = mlx_lm.generate.__globals__["generate_step"](
        mx.array(prompt), model, max_tokens=0, prompt_cache=made, **options
    )
    list(feed)
    path = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(path, made, {"model": family})
    plain = plain_tokens(
        model, tokenizer, more, prompt_cache=load_prompt_cache(path), max_tokens=16, **options
    )
    assert plain == plain_tokens(model, tokenizer, prompt + more, max_tokens=16, **options)
    loaded = load_prompt_cache(path)
    drafter = random_drafter(model)
    ours = drafted(model, tokenizer, more, drafter, prompt_cache=loaded, max_tokens=16, **options)
    assert ours == plain
    # And saved again with the drafter's caches in it, for the next session.
    save_prompt_cache(path, loaded)
    third = random_prompt(5, seed=6)
    text = prompt + more + plain + third
    again = drafted(
        model,
        tokenizer,
        third,
        drafter,
        prompt_cache=load_prompt_cache(path),
        max_tokens=8,
        **options,
    )
    assert again == plain_tokens(model, tokenizer, text, max_tokens=8, **options)


def chat(
    caches: PromptCaches, model: nn.Module, tokenizer: TokenizerWrapper, tokens: list[int]
) -> Any:
    """One request as a server or a chat program makes it: the text, and tokens prefilled for it."""
    prompt_cache, rest = caches.fetch_nearest_cache("pair", tokens)
    prompt_cache = prompt_cache or make_prompt_cache(model)
    reply = drafted(
        model,
        tokenizer,
        rest,
        random_drafter(model),
        max_tokens=9,
        prompt_cache=prompt_cache,
        prompt_checkpoints=caches.checkpoints("pair", tokens, rest, tokenizer.eos_token_ids),
    )
    caches.insert_cache("pair", tokens + reply, prompt_cache)
    return reply, len(rest)


@pytest.mark.parametrize("family", [*map(slow, HYBRIDS[1:]), "qwen3_5", "gpt_oss", "qwen3"])
def test_the_second_turn_prefills_only_what_is_new(
    tokenizer: TokenizerWrapper, family: str
) -> None:
    model = model_of(family)
    end = min(tokenizer.eos_token_ids)
    caches = PromptCaches()
    system, user = [*random_prompt(30), end], [*random_prompt(20, seed=1), end]
    first = [*system, *user, 8, 9]
    reply, prefilled = chat(caches, model, tokenizer, first)
    assert prefilled == len(first)
    assert reply == plain_tokens(model, tokenizer, first, max_tokens=9)

    following = [*random_prompt(6, seed=2), end, 8, 9]
    for rewritten in (False, True):  # a template that repeats the reply, one that strips thoughts
        kept = [8, 10, *reply[4:]] if rewritten else [8, 9, *reply]
        second = [*system, *user, *kept, end, *following]
        text, prefilled = chat(caches, model, tokenizer, second)
        assert text == plain_tokens(model, tokenizer, second, max_tokens=9)
        assert prefilled <= len(kept) + 1 + len(following)
        if not rewritten:
            assert prefilled == 1 + len(following)
    other = [*system, *random_prompt(12, seed=3), end, 8, 9]
    text, prefilled = chat(caches, model, tokenizer, other)
    assert text == plain_tokens(model, tokenizer, other, max_tokens=9)
    assert prefilled == len(other) - len(system)
    text, prefilled = chat(caches, model, tokenizer, other)  # the very prompt again
    assert text == plain_tokens(model, tokenizer, other, max_tokens=9)
    assert prefilled == len(other) - other.index(end, len(system)) - 1 or family == "qwen3"


def test_checkpoints_obey_the_byte_cap(tokenizer: TokenizerWrapper) -> None:
    model = model_of("qwen3_5")
    end = min(tokenizer.eos_token_ids)
    caches = PromptCaches(max_size=100)
    prompt = [*random_prompt(20), end, 8, 9]
    chat(caches, model, tokenizer, prompt)
    assert len(caches) == 2
    one = caches.nbytes // 2
    caches = PromptCaches(max_size=100, max_bytes=5 * one)
    for seed in range(8):
        chat(caches, model, tokenizer, [*random_prompt(20, seed=seed), end, 8, 9])
        assert caches.nbytes <= 5 * one
    assert 2 <= len(caches) <= 5


@pytest.mark.parametrize("place", [0, 6, 7, -1])
def test_checkpoints_outside_the_prompt_are_refused(
    tokenizer: TokenizerWrapper, place: int
) -> None:
    model = model_of("qwen3_5")
    with pytest.raises(InputError, match="prompt_checkpoints has"):
        drafted(
            model,
            tokenizer,
            random_prompt(6),
            random_drafter(model),
            prompt_checkpoints={place: print},
        )
