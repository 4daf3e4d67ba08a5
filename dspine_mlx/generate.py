"""mlx-lm's stream_generate and generate, with a drafter."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, generation_stream, wired_limit
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.sample_utils import LogitsProcessor
from mlx_lm.sample_utils import Sampler as SamplerFunction
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.arguments import (
    check_cache_sizes,
    check_flag,
    check_function,
    check_kv_quantization,
    check_max_tokens,
    check_model,
    check_processors,
    check_stream,
    check_text,
    check_tokenizer,
    check_top_k,
    prompt_ids,
    vocabulary_of,
)
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.round.decode import Prefill, decode
from dspine_mlx.round.lookup import Lookup
from dspine_mlx.round.policy import Policy, check_verify_length
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.statistics import GenerationResponse, Speed, Statistics
from dspine_mlx.round.text import Checkpoints, DraftFilter, Text, Token
from dspine_mlx.round.user_code import FedByMLX, user_processors, user_sampler
from dspine_mlx.target.given_cache import check_given, check_length, target_layout
from dspine_mlx.target.kv_quantization import KVQuantization
from dspine_mlx.target.swap import TURN
from dspine_mlx.verify_length.schedule import policy_for


def plain_tokens(
    prompt: mx.array,
    model: nn.Module,
    *,
    sampler: SamplerFunction,
    prompt_cache: list[Any] | None,
    **options: Any,
) -> Generator[Token, None, None]:
    """Decode with mlx-lm alone, for a model without a drafter. A drafter's entries in the cache are
    left as they are."""
    own = None if prompt_cache is None else prompt_cache[: len(make_prompt_cache(model))]
    fed = FedByMLX(sampler)
    options |= {"sampler": fed, "prompt_cache": own}
    steps = generate_step(prompt, model, **options)
    try:
        while True:
            with TURN:
                step = next(steps, None)
            if step is None:
                return
            yield fed.read(), step[1], False
    finally:
        steps.close()
        if prompt_cache is not None and own is not None:
            prompt_cache[: len(own)] = own


def make_caches(
    model: nn.Module, drafter: Drafter, given: list[Any] | None, max_kv_size: int | None
) -> list[Any]:
    """Make the target's caches, then the drafter's, in the caller's list if there is one.

    A list with only the target's caches gets new ones for the drafter appended. Rotary positions
    are relative, so a drafter that has not seen the cached tokens still drafts, from less context.
    Quantised caches of the drafter are replaced in the same way.
    """
    if given is None:
        return make_prompt_cache(model, max_kv_size) + drafter.make_cache()
    count = check_length(given, model)
    check_given(given, drafter.target.cache_layout)
    if len(given) == count:
        given.extend(drafter.make_cache())
    if len(given) != count + len(drafter.layers):
        raise InputError(
            f"prompt_cache has {len(given)} entries; this pair needs {count} for the target and "
            f"{len(drafter.layers)} for the drafter"
        )
    if any(type(c) is not KVCache for c in given[count:]):
        given[count:] = drafter.make_cache()
    check_given(given, drafter.cache_layout, count, "drafter")
    return given


def to_token_ids(
    tokenizer: TokenizerWrapper, prompt: str | mx.array | list[int], vocabulary: int | None
) -> mx.array:
    """Tokenise a prompt; a string gets special tokens unless it starts with them."""
    if isinstance(prompt, str):
        check_text(prompt)
        bos = tokenizer.bos_token
        prompt = tokenizer.encode(prompt, add_special_tokens=not (bos and prompt.startswith(bos)))
    return prompt_ids(prompt, vocabulary)


def check_checkpoints(prompt: mx.array, checkpoints: Any) -> None:
    """Each lies before the prompt's last token, which prefill does not feed."""
    if not isinstance(checkpoints, Mapping) or not all(map(callable, checkpoints.values())):
        raise InputError(f"prompt_checkpoints is {checkpoints!r}; it must be {{n: function}}")
    wrong = [n for n in checkpoints if type(n) is not int or not 0 < n < prompt.size]
    if wrong:
        raise InputError(
            f"prompt_checkpoints has {wrong}; the places must lie between 1 and {prompt.size - 1}, "
            "the prompt's tokens but the last"
        )


def drafter_of(drafter: Any, draft_model: Any, model: nn.Module) -> Drafter | None:
    """The drafter, under our name for it or mlx-lm's."""
    if drafter is not None and draft_model is not None:
        raise InputError("drafter and draft_model are two names for one thing; give one of them")
    given = draft_model if drafter is None else drafter
    if given is None:
        return None
    if not isinstance(given, Drafter):
        raise InputError(
            f"the drafter is a {type(given).__name__}; it must come from load or load_drafter "
            "(a whole model can draft in mlx_lm.stream_generate)"
        )
    if given.target.model is not model:
        raise InputError("the drafter is bound to another model; load it for this one")
    return given


def verify_length_of(
    verify_length: int | str | Policy, num_draft_tokens: int | None
) -> int | str | Policy:
    """The verify length, under our name for it or mlx-lm's."""
    if num_draft_tokens is not None:
        if verify_length != "auto":
            raise InputError(
                f"num_draft_tokens is {num_draft_tokens} and verify_length {verify_length!r}; they "
                "are two names for one thing: give one of them"
            )
        verify_length = num_draft_tokens
    check_verify_length(verify_length)
    return verify_length


def stream_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: str | mx.array | list[int],
    drafter: Drafter | None = None,
    *,
    max_tokens: int = 256,
    sampler: SamplerFunction | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    prompt_cache: list[Any] | None = None,
    prompt_checkpoints: Checkpoints | None = None,
    verify_length: int | str | Policy = "auto",
    draft_filter: DraftFilter | None = None,
    lookup: bool = True,
    cached_tokens: list[int] | None = None,
    draft_model: Drafter | None = None,
    num_draft_tokens: int | None = None,
    max_kv_size: int | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    stream: mx.Stream = generation_stream,
) -> Generator[GenerationResponse, None, None]:
    """mlx_lm.stream_generate with a drafter: the target's own text, one response per token.

    Args: mlx-lm's, and
        drafter: from `load` or `load_drafter`, bound to this model. None: plain mlx-lm decoding.
        sampler: greedy when None. A `dspine_mlx.Sampler` lets drafts be sampled and tested by
            ratio. One with `seeded=True`, and any other callable, is sampled from row by row and
            compared with the drafted tokens: after `mx.random.seed` the text is that of plain
            decoding with that seed. Drafts foresee a seeded `Sampler`'s draws, so more of them are
            accepted.
        prompt_cache: as mlx-lm's, with the drafter's caches after the target's (appended if
            missing). Once the generator has ended or was closed, it holds the prompt and the
            yielded tokens; starting another generation from it ends an unfinished one.
        prompt_checkpoints: {n: f}: when the caches hold n tokens of the prompt, f is called with
            their list (to copy it; see `dspine_mlx.target.prompt_cache`). Ignored without a
            drafter.
        verify_length: drafted tokens offered to the target per round: an int, "auto", or a
            policy (see `dspine_mlx.round.policy`). 0 is plain decoding.
        draft_filter: called with the tokens so far and a draft, returns how many drafted tokens
            are worth verifying; for a logits processor that forbids tokens, such as a grammar.
        lookup: if verify_length is "auto", offer what followed the newest tokens earlier in the
            prompt or text, in rounds where that is worth more than the draft or plain tokens.
        cached_tokens: the tokens that prompt_cache holds already; copies come from them, too.
        draft_model, num_draft_tokens: mlx-lm's names for drafter and a fixed verify_length.

    logits_processors are called for every row of a block, with the tokens before the row. They must
    keep no state between calls.
    """
    check_model(model)
    check_max_tokens(max_tokens)
    drafter = drafter_of(drafter, draft_model, model)
    verify_length = verify_length_of(verify_length, num_draft_tokens)
    check_cache_sizes(prefill_step_size, max_kv_size)
    check_kv_quantization(kv_bits, kv_group_size, quantized_kv_start)
    check_function("sampler", sampler)
    check_function("draft_filter", draft_filter)
    check_function("prompt_progress_callback", prompt_progress_callback)
    check_processors(logits_processors)
    check_flag("lookup", lookup)
    check_stream(stream)
    if not isinstance(tokenizer, TokenizerWrapper):
        check_tokenizer(tokenizer)
        tokenizer = TokenizerWrapper(tokenizer)
    vocabulary = vocabulary_of(model)
    prompt = to_token_ids(tokenizer, prompt, vocabulary)
    speed = Speed(prompt_progress_callback)
    sampler, processors = user_sampler(sampler), user_processors(logits_processors)
    if isinstance(sampler, Sampler) and vocabulary is not None:
        check_top_k(sampler.top_k, vocabulary)
    statistics = Statistics()
    quantization = KVQuantization(kv_bits, kv_group_size, quantized_kv_start)
    quantization.check_model(model, max_kv_size)
    checkpoints = {} if prompt_checkpoints is None else prompt_checkpoints
    check_checkpoints(prompt, checkpoints)
    cached = prompt_ids(cached_tokens, vocabulary).tolist() if cached_tokens else []
    if drafter is None:
        if prompt_cache is not None:
            check_length(prompt_cache, model)
            check_given(prompt_cache, target_layout(model))
        tokens = plain_tokens(
            prompt,
            model,
            stream=stream,
            max_tokens=max_tokens,
            sampler=sampler,
            logits_processors=processors,
            prompt_cache=prompt_cache,
            max_kv_size=max_kv_size,
            prefill_step_size=prefill_step_size,
            kv_bits=kv_bits,
            kv_group_size=kv_group_size,
            quantized_kv_start=quantized_kv_start,
            prompt_progress_callback=speed.progress,
        )
    else:
        stops = frozenset(tokenizer.eos_token_ids)
        if kv_bits is not None:
            drafter.target.verify_kernels.expect_caches(kv_bits, kv_group_size)
        text = partial(
            Text,
            drafter,
            make_caches(model, drafter, prompt_cache, max_kv_size),
            sampler,
            processors,
            quantization,
            stops,
            statistics,
            draft_filter,
            Lookup(stops, cached) if lookup else None,
            prompt_cache is not None,
        )
        tokens = decode(
            prompt,
            text,
            partial(policy_for, verify_length, drafter, sampler),
            stream,
            Prefill(prefill_step_size, checkpoints, speed.progress),
            float("inf") if max_tokens < 0 else max_tokens,
        )
    responses = to_responses(tokens, tokenizer, prompt.size, max_tokens, statistics, speed)
    return with_wired_memory([model, drafter and drafter.network], stream, tokens, responses)


def with_wired_memory(
    modules: list[Any],
    stream: mx.Stream,
    tokens: Generator[Token, None, None],
    responses: Iterator[GenerationResponse],
) -> Generator[GenerationResponse, None, None]:
    """Yield the responses with the modules' memory wired, and close the tokens at the end."""
    with wired_limit(modules, [stream]), closing(tokens):
        yield from responses


def to_responses(
    tokens: Iterator[Token],
    tokenizer: TokenizerWrapper,
    prompt_tokens: int,
    max_tokens: int,
    statistics: Statistics,
    speed: Speed,
) -> Iterator[GenerationResponse]:
    """Turn tokens into responses, up to and including a stop token or the last one allowed."""
    detokenizer = tokenizer.detokenizer
    for n, (token, logprobs, drafted) in enumerate(tokens, 1):
        stopped = token in tokenizer.eos_token_ids
        if not stopped:
            detokenizer.add_token(token)
        if stopped or n == max_tokens:
            detokenizer.finalize()
        yield GenerationResponse(
            text=detokenizer.last_segment,
            token=token,
            logprobs=logprobs,
            from_draft=drafted,
            prompt_tokens=prompt_tokens,
            prompt_tps=speed.prompt_tps,
            generation_tokens=n,
            generation_tps=speed.generation_tps(n),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason="stop" if stopped else "length" if n == max_tokens else None,
            statistics=statistics,
            rounds=statistics.rounds,
            drafted=statistics.drafted,
            accepted=statistics.accepted,
            acceptance_length=statistics.acceptance_length,
        )
        if stopped or n == max_tokens:
            return


def generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: str | mx.array | list[int],
    drafter: Drafter | None = None,
    verbose: bool = False,
    **options: Any,
) -> str:
    """Generate the whole text; options are those of `stream_generate`.

    verbose: print the text as it comes, and speed and acceptance at the end.
    """
    text = ""
    for response in stream_generate(model, tokenizer, prompt, drafter, **options):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose:
        print(
            f"\n{response.generation_tokens} tokens, {response.generation_tps:.1f} per second, "
            f"{response.acceptance_length:.2f} per round; peak memory {response.peak_memory:.2f} GB"
        )
    return text
