"""mlx-lm's batch_generate, with a drafter."""

import time
from collections.abc import Generator
from typing import Any

import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import BatchResponse
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.batch.generation import Generation, Prompts, Response, check_batch
from dspine_mlx.drafters.drafter import Drafter


def batch_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompts: Prompts,
    drafter: Drafter | None = None,
    *,
    max_tokens: int | list[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    **options: Any,
) -> BatchResponse:
    """mlx_lm.batch_generate with a drafter: the texts of all prompts, decoded together.

    Every text is the target's own, as `stream_generate` would decode it alone: greedy and seeded
    ones token by token, wherever the backend gives a row the same logits in any company.

    Args: mlx-lm's, where sampler may also be a list with one per prompt, and logits_processors one
        with a list per prompt; and
        drafter: from `load` or `load_drafter`. None: mlx-lm's own batches, with its arguments.
        seeds: one per prompt. A text with a seed draws from a random state of its own: it is that
            of plain decoding after `mx.random.seed`, whatever else is in the batch.
        draft_filter: as in `stream_generate`, one for all or a list with one per prompt.
        verify_length: drafted tokens that each text offers per round: an int, or "auto", which
            gives the rows to the likeliest ones. 0 is plain decoding.
        lookup: if verify_length is "auto", offer what followed a text's newest tokens earlier in it
            where that is worth more than its draft.
        completion_batch_size: texts that are decoded at once; the others wait.

    Targets that don't decode several texts in one forward here (`dspine_mlx.batch.target_rows`),
    and caches of a limited size, are decoded one text after another. Of prompt caches see
    `stream_generate`; the given ones are not changed, those that are returned hold all of the text.
    """
    check_batch(model, tokenizer, prompts)
    if drafter is None:
        return mlx_lm.batch_generate(
            model,
            tokenizer,
            prompts,
            max_tokens=max_tokens,
            verbose=verbose,
            return_prompt_caches=return_prompt_caches,
            return_token_ids=return_token_ids,
            return_logprobs=return_logprobs,
            **options,
        )
    batch = Generation.of(model, tokenizer, prompts, drafter, max_tokens=max_tokens, **options)
    batch.return_caches, started = return_prompt_caches, time.perf_counter()
    tokens = [list[int]() for _ in prompts]
    logprobs = [list[float]() for _ in prompts]
    for index, (token, row, _) in batch.tokens():
        if token not in batch.tokenizer.eos_token_ids:
            tokens[index].append(token)
            if return_logprobs:
                logprobs[index].append(row[token].item())
    stats = batch.stats(sum(map(len, tokens)), time.perf_counter() - started)
    if verbose:
        print(
            f"{len(prompts)} texts, {stats.generation_tokens} tokens in {stats.generation_steps} "
            f"steps, {stats.generation_tps:.1f} per second; peak memory {stats.peak_memory:.2f} GB"
        )
    return BatchResponse(
        [batch.tokenizer.decode(ids) for ids in tokens],
        stats,
        [entry.caches for entry in batch.entries] if return_prompt_caches else None,
        tokens if return_token_ids else None,
        logprobs if return_logprobs else None,
    )


def batch_stream_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompts: Prompts,
    drafter: Drafter,
    **options: Any,
) -> Generator[Response, None, None]:
    """`batch_generate` token by token, with its arguments: pairs of a prompt's index and its next
    response, which is one of `stream_generate`'s. Closing it ends all texts."""
    return Generation.of(model, tokenizer, prompts, drafter, **options).responses()
