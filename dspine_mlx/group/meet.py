"""A command on several machines: rank 0 runs it, the others follow until it is over."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.group.channel import Channel
from dspine_mlx.group.connections import Connections, connections
from dspine_mlx.group.interrupts import INTERRUPTED, immediate_interrupts, noticed, uninterrupted
from dspine_mlx.group.jobs import Jobs
from dspine_mlx.group.no_drafter import NoDrafter
from dspine_mlx.group.shards import check_rollback, load_part, see_whole
from dspine_mlx.group.target import LeadTarget, PartOfTarget
from dspine_mlx.group.watchdog import SECONDS, Watchdog, meeting
from dspine_mlx.load import load_drafter
from dspine_mlx.target.row_kernels import untold

RANK = "MLX_RANK"  # MLX's own, which mlx.launch sets


class Group:
    """The ranks that mlx.launch has started, as one of them.

    pipeline: split the target by layers, not by tensors.
    """

    def __init__(
        self,
        group: mx.distributed.Group,
        pipeline: bool,
        seconds: float = SECONDS,
        connections: Connections | None = None,
    ):
        self.rank, self.size, self.pipeline = group.rank(), group.size(), pipeline
        self.channel = Channel(group, Watchdog(self.rank, self.size, seconds, connections))
        self.target: LeadTarget | None = None  # rank 0's, once it is loaded

    @property
    def follows(self) -> bool:
        return self.rank > 0

    def load(
        self,
        model: str,
        draft: str | None,
        *,
        tokenizer_config: dict[str, Any] | None = None,
        kernels: str = "auto",
        draft_quant: int | None = None,
        told: Callable[[str], None] = untold,
    ) -> tuple[nn.Module, TokenizerWrapper, Drafter]:
        """Rank 0: its part of the target, the tokenizer, and the drafter, or one that drafts
        nothing."""
        settings = tokenizer_config or {"trust_remote_code": False}
        module, tokenizer = load_part(model, self.channel, self.pipeline, settings)
        target = LeadTarget(module, self.channel)
        with uninterrupted():  # from here on the others leave Ctrl-C to this rank
            check_rollback(target)
            self.target = target
        if draft is None:
            return module, tokenizer, NoDrafter(target)
        see_whole(target, model)
        drafter = load_drafter(draft, target, kernels=kernels, draft_quant=draft_quant, told=told)
        return module, tokenizer, drafter

    def follow(self, model: str, tokenizer_config: dict[str, Any]) -> None:
        """The others: load their part, and follow until rank 0 is done; then the process ends.

        Ctrl-C, which reaches all ranks, ends this one while models load. Later it is for rank 0,
        which tells the others. Only if that can't (they are at work of their own) its loss says it.
        """
        interrupts: list[Any] = []
        try:
            with immediate_interrupts():
                module, tokenizer = load_part(model, self.channel, self.pipeline, tokenizer_config)
                target = PartOfTarget(module, self.channel)
                check_rollback(target)
            with noticed() as interrupts:
                Jobs(target, tokenizer).run()
        except RuntimeError as error:  # of any evaluation, when a rank is lost
            if interrupts:
                os._exit(INTERRUPTED)
            self.channel.note(error)
            raise
        sys.exit(0)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Rank 0: within the block the others follow; they end with it, however it ends."""
        problem = "rank 0 gave up"
        try:
            yield
        except InputError as error:
            problem = str(error)
            raise
        except KeyboardInterrupt:
            if self.target is None:  # the others may be anywhere in mlx-lm's loading
                leave()
            raise
        except RuntimeError as error:
            self.channel.note(error)
            raise
        finally:
            if not self.channel.closed:
                self.part(problem)

    def part(self, problem: str) -> None:
        """Rank 0: let the others end."""
        if self.channel.announced:  # they run what this rank has left, and would wait for it
            leave()
        if self.target is not None:
            self.target.group.share(do="done")
        else:  # they wait for its word on what they have found
            with suppress(InputError):
                self.channel.agree(problem)


def leave() -> NoReturn:
    """End this process at once, with the sentence of its error: the others find it lost."""
    kind, error, traceback = sys.exc_info()
    if kind is not None and error is not None:
        sys.excepthook(kind, error, traceback)
    sys.stdout.flush()
    os._exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)


def meet(pipeline: bool = False, seconds: float = SECONDS) -> Group | None:
    """The group that this process belongs to, or None if it is the only one."""
    before = connections().keys()
    if RANK in os.environ:
        with meeting(seconds), immediate_interrupts():
            group = mx.distributed.init()
    else:
        group = mx.distributed.init()
    if group.size() > 1:
        made = {number: to for number, to in connections().items() if number not in before}
        return Group(group, pipeline, seconds, Connections(made))
    if pipeline:
        raise InputError("--pipeline needs several machines: start this command with mlx.launch")
    return None


def follows() -> bool:
    """Whether this process is one that only follows, and leaves all words to rank 0."""
    return RANK in os.environ and mx.distributed.init().rank() > 0
