"""Decoding a request: checks against the model, options, and statistics of its rounds."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm import server as host
from mlx_lm.generate import GenerationResponse
from mlx_lm.sample_utils import LogitsProcessor
from mlx_lm.sample_utils import Sampler as SamplerFunction

from dspine_mlx.errors import InputError
from dspine_mlx.round.sampler import Sampler, never_excluded
from dspine_mlx.round.text import DraftFilter
from dspine_mlx.server.call import Call, Reasoning
from dspine_mlx.server.fields import FieldError
from dspine_mlx.server.grammar import Constraint, constraint
from dspine_mlx.server.provider import Provider


@dataclass
class Arguments(host.GenerationArguments):
    """A request's arguments, and the call they belong to.

    prepared: a tokenizer and the result of `_tokenize`, once the HTTP thread has made it.
    """

    call: Call
    prepared: tuple[Any, tuple] | None = None


def reasoning(inside: bool, asked: bool) -> Reasoning:
    """Allow a reply to open a reasoning block only if the client asked for one: other models with
    such tokens would use them to bypass the grammar."""
    if inside:
        return "inside"
    return "possible" if asked else "over"


def check_prompt(prompt: list[int], args: Arguments, provider: Provider) -> None:
    """Check what depends on the model; `InputError` for a request that it can't decode."""
    if len(prompt) == 0:
        raise InputError("the prompt is empty; give at least one token")
    limit, vocabulary = provider.context_length, provider.vocab_size
    if limit is not None and len(prompt) > limit:
        raise InputError(f"the prompt has {len(prompt)} tokens; the model's context has {limit}")
    if limit is not None and args.max_tokens > limit:
        raise FieldError(
            "max_tokens", f"max_tokens is {args.max_tokens}; the model's context has {limit} tokens"
        )
    if vocabulary is None:
        return
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise InputError(f"the prompt has a token outside the model's {vocabulary}")
    if any(token >= vocabulary for token in args.logits.logit_bias or {}):
        raise FieldError("logit_bias", f"logit_bias names a token outside the model's {vocabulary}")
    if args.sampling.top_k >= vocabulary:
        raise FieldError(
            "top_k", f"top_k is {args.sampling.top_k}; it must be below the model's {vocabulary}"
        )


def try_sampling(prompt: list[int], args: Arguments, tokenizer: Any, vocabulary: int) -> None:
    """Run the request's processors and sampler once, before they run in a batch with others."""
    context = mx.array(prompt[-2:])
    logits = mx.zeros((1, vocabulary))
    try:
        for processor in host._make_logits_processors(args):
            logits = processor(context, logits)
        mx.eval(host._make_sampler(args, tokenizer)(logits - mx.logsumexp(logits)))
    except Exception as error:  # of any type, but this request's fault
        raise InputError(f"this request can't be sampled: {error}") from error


def checked(call: Call, options: dict[str, Any]) -> Callable[[int, int], None]:
    """Wrap the prefill's progress callback so that it ends the prefill of a failed call."""
    progress = options["prompt_progress_callback"]

    def report(done: int, total: int) -> None:
        call.check()
        progress(done, total)
        if done < total:
            call.round_started = time.perf_counter()

    return report


@dataclass(frozen=True)
class TextSettings:
    """What a request asks of its text."""

    sampler: SamplerFunction
    processors: list[LogitsProcessor]
    stops: frozenset[int]  # tokens that end it
    draft_filter: DraftFilter | None
    verify_length: int | str
    seed: int | None


def text_settings(
    args: Arguments, tokenizer: Any, sampler: SamplerFunction, processors: list[LogitsProcessor]
) -> TextSettings:
    """sampler, processors: mlx_lm's, for these arguments."""
    grammar = constraint(args.call, tokenizer)
    return TextSettings(
        own_sampler(args, tokenizer, grammar) or sampler,
        processors if grammar is None else [*processors, grammar],
        frozenset(tokenizer.eos_token_ids),
        None if grammar is None else grammar.permitted,
        args.call.verify_length if args.call.drafted else 0,
        args.seed,
    )


def own_sampler(args: Arguments, tokenizer: Any, grammar: Constraint | None) -> Sampler | None:
    """A sampler with probabilities in place of mlx_lm's.

    With a seed the draws are those of seeded plain decoding, and drafts foresee them. Otherwise
    drafts are sampled and verified by the ratio test, except under a grammar, which cuts them.
    """
    seeded = args.seed is not None
    if args.sampling.temperature == 0 or (grammar is not None and not seeded):
        return None
    return Sampler(
        args.sampling.temperature,
        top_p=args.sampling.top_p,
        top_k=args.sampling.top_k,
        min_p=args.sampling.min_p,
        xtc_probability=args.sampling.xtc_probability,
        xtc_threshold=args.sampling.xtc_threshold,
        xtc_special_tokens=never_excluded(tokenizer),
        seeded=seeded,
    )


def random_state(sampler: SamplerFunction | None, seed: int, tokens: int) -> mx.array:
    """`mx.random`'s state after a seed and so many tokens. Each token is one draw, with XTC's coin
    two, and each draw goes on with the first half of the split state."""
    state = mx.random.key(seed)
    if isinstance(sampler, Sampler):
        for _ in range(tokens * (2 if sampler.xtc_probability > 0 else 1)):
            state = mx.random.split(state)[0]
    return state


def drafting(
    options: dict[str, Any], args: Arguments, tokenizer: Any, grammar: Constraint | None
) -> dict[str, Any]:
    """Turn options of mlx_lm's stream_generate into those of dspine_mlx.stream_generate."""
    unknown = ("num_draft_tokens", "input_embeddings")
    options = {name: value for name, value in options.items() if name not in unknown}
    options["verify_length"] = args.call.verify_length
    options["sampler"] = own_sampler(args, tokenizer, grammar) or options["sampler"]
    if grammar is not None:
        options["draft_filter"] = grammar.permitted
    return options


def observed(tokens: Iterator[GenerationResponse], call: Call) -> Iterator[GenerationResponse]:
    """Pass the tokens on until the call fails; times its rounds and keeps its statistics.

    Stopping after a token leaves the caches at the tokens so far; they then go to the prompt cache.
    """
    for response in tokens:
        if call.path == "speculative":
            call.statistics = response.statistics
            call.timed()
        yield response
        if call.failure is not None:
            return
