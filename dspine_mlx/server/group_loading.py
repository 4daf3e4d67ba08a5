"""Loading a target's drafter on several machines, and the flags that a group can't serve with."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dspine_mlx.errors import InputError
from dspine_mlx.group.jobs import Jobs
from dspine_mlx.group.target import PartOfTarget
from dspine_mlx.server.fields import FieldError


@contextmanager
def loading(part: PartOfTarget | None) -> Iterator[None]:
    """On rank 0 of a group: within the block the others do what loading a drafter asks of them, and
    fail with it."""
    if part is None:
        yield
        return
    part.channel.watchdog.disarm()  # it may take long
    failed = True
    try:
        yield
        failed = False
    finally:
        part.group.share(do="done", failed=failed)


def follow_loading(part: PartOfTarget, tokenizer: Any) -> None:
    """The others' side of `loading`."""
    part.channel.watchdog.disarm()
    if Jobs(part, tokenizer).run()["failed"]:
        raise FieldError("draft_model", "rank 0 can't load the drafter")


def check_group_flags(cli_args: Namespace) -> None:
    """Refuse flags that a group can't serve with."""
    if cli_args.adapter_path is not None:
        raise InputError("--adapter-path can't be used on several machines; leave it out")
    if cli_args.prompt_cache_bytes is not None:
        raise InputError(
            "--prompt-cache-bytes can't be used on several machines, which would drop different "
            "caches; limit them with --prompt-cache-size"
        )
