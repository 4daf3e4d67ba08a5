"""Serving on several machines: all ranks take each request, and follow rank 0 through its text.

mlx_lm.server shares every request with all ranks, which look up their prompt caches and batch in
step. What only rank 0 can know is decided before a request is shared: whether it is still wanted,
its tokens, and whether it is drafted. A text that is served alone is rank 0's: it may end anywhere.
"""

import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from queue import Empty, Queue
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import LostRank
from dspine_mlx.generate import stream_generate
from dspine_mlx.group.follow import Followed, Follower
from dspine_mlx.group.interrupts import handled, immediate_interrupts
from dspine_mlx.group.target import LeadTarget, PartOfTarget
from dspine_mlx.server.decoding import Arguments, checked, drafting, observed
from dspine_mlx.server.grammar import constraint

STOP = "stop"
LOOK = 0.1  # seconds between two looks at a target that loads


class Stopped(Exception):
    """Rank 0 has stopped serving."""


def next_item(requests: Queue, timeout: float | None) -> tuple | None:
    """Rank 0: a request from the HTTP threads, if there is one."""
    try:
        item: tuple = requests.get_nowait() if timeout is None else requests.get(timeout=timeout)
    except Empty:
        return None
    return item


def shareable(args: Arguments) -> Arguments:
    """Arguments without this machine's tokenizer; the tokens themselves go with them. (Images are
    read by every rank.)"""
    prepared = args.prepared
    if prepared is None or prepared[1][-1] is not None:
        return replace(args, prepared=None)
    return replace(args, prepared=(None, prepared[1]))


def text_in_group(
    part: PartOfTarget,
    tokenizer: Any,
    prompt: list[int],
    drafter: Drafter | None,
    options: dict[str, Any],
    args: Arguments,
) -> Iterator[Any]:
    """One text on several machines: rank 0's, which the others follow."""
    if not isinstance(part, LeadTarget):
        yield from followed(part, prompt, options)
        return
    call = args.call

    def make() -> Generator[GenerationResponse, None, None]:
        grammar = constraint(call, tokenizer)
        given = drafting(options, args, tokenizer, grammar)
        if grammar is not None:
            given["logits_processors"] = [*given["logits_processors"], grammar]
        if call.path != "speculative":
            given["verify_length"] = 0
        given["prompt_progress_callback"] = checked(call, options)
        return stream_generate(part.model, tokenizer, prompt, drafter, **given)

    yield from observed(led(part, make), call)


def led(
    target: LeadTarget, make: Callable[[], Generator[GenerationResponse, None, None]]
) -> Iterator[GenerationResponse]:
    """Rank 0: a text that the others follow. However it ends, they learn of it, and have its random
    state, which batches draw from in step."""
    failed = True
    try:
        with closing(make()) as tokens:
            yield from tokens
        failed = False
    except GeneratorExit:
        failed = False
        raise
    finally:
        if not target.group.lost:
            target.group.share(do="done", failed=failed, state=mx.random.state[0].tolist())


def followed(
    target: PartOfTarget, prompt: list[int], options: dict[str, Any]
) -> Iterator[SimpleNamespace]:
    """The others: the tokens of rank 0's text, once it is over, as `_serve_single` reads them."""
    job, text = target.channel.receive(), Followed(failed=True)
    if job["do"] == "text":
        follower = Follower(target, job, options["prompt_cache"], options["prompt_checkpoints"])
        text = follower.run(options["stream"])
        job = target.channel.receive()
    mx.random.state[0][:] = mx.array(job["state"], mx.uint32)
    if job["failed"] or text.failed:
        raise RuntimeError("the request has failed on rank 0")
    logprobs = mx.zeros((target.vocab_size,))
    for token in text.tokens[len(prompt) :]:
        yield SimpleNamespace(text="", token=token, logprobs=logprobs, finish_reason=None)


def follow(generator: Any) -> None:
    """A rank other than 0: serve in step with it until it stops; `LostRank` if it is lost. Ctrl-C
    ends this rank while its part loads; later it is for rank 0."""
    with immediate_interrupts():
        while generator.model_provider.part is None and not generator.ended:
            time.sleep(LOOK)
    with handled(signal.SIG_IGN):
        generator.join()
    if generator.has_failed:
        raise LostRank("this rank of the group has failed; the log above says why")


def check_group(target: PartOfTarget | None) -> None:
    """Raise `LostRank` if the group has ended meanwhile."""
    if target is not None and target.group.lost:
        raise LostRank("another rank is lost, so this group's server ends")
