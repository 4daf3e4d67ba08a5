"""mlx-lm's own decoding in a group: every rank runs it, and all of them to its end."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import GenerationResponse, generation_stream
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.group.target import LeadTarget
from dspine_mlx.round.sampler import Sampler


def plain_in_step(
    target: LeadTarget,
    tokenizer: TokenizerWrapper,
    prompt: list[int],
    sampler: Sampler,
    progress: Any = None,
    **options: Any,
) -> Iterator[GenerationResponse]:
    """Rank 0: mlx_lm.stream_generate on all ranks, with one random state. It can't be left before
    its end: the others would wait for ever, so the process then ends with its group."""
    channel = target.channel
    job = {"prompt": prompt, "sampler": asdict(sampler), "options": options}
    job |= {"state": mx.random.state[0].tolist()}
    with target.group.together(do="plain", **job):
        for response in decode_job(target.model, tokenizer, job, progress):
            channel.watchdog.disarm()
            yield response
            channel.watchdog.arm()
        channel.watchdog.disarm()


def decode_job(
    model: nn.Module, tokenizer: TokenizerWrapper, job: dict[str, Any], progress: Any = None
) -> Iterator[GenerationResponse]:
    """Any rank: the text of a job."""
    mx.random.state[0][:] = mx.array(job["state"], mx.uint32)
    sampler = Sampler(**{name: unlisted(value) for name, value in job["sampler"].items()})
    yield from mlx_lm.stream_generate(
        model,
        tokenizer,
        job["prompt"],
        sampler=sampler if sampler.temp > 0 else None,
        prompt_progress_callback=progress,
        **job["options"],
    )
    # mlx-lm leaves a forward behind, whose collectives would meet those of the next job's stream.
    mx.synchronize(generation_stream)


def unlisted(value: Any) -> Any:
    """JSON has no tuples."""
    return tuple(value) if isinstance(value, list) else value
