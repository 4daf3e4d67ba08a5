"""Opening a target: mlx-lm's load, for folders that nobody vouches for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.errors import InputError


def open_target(folder: Path, name: str, **options: Any) -> tuple[nn.Module, TokenizerWrapper]:
    """A model of mlx-lm's that can be called, and its tokenizer; options are mlx_lm.load's.

    name: what the user calls the folder. A forward over one token is built and not run: it finds
    values that no constructor looks at, such as a norm's epsilon that is a string.
    """
    with opening(name):
        model, tokenizer = mlx_lm.load(str(folder), **options)
        model(mx.array([[0]]), cache=make_prompt_cache(model))
    return model, tokenizer


@contextmanager
def opening(name: str) -> Iterator[None]:
    """Whatever mlx-lm or transformers raise of a folder is an `InputError` that names it.

    The error's kind says nothing about whose fault it is: no heads are a ZeroDivisionError, a key
    too few is a TypeError, an unknown tool parser a ModuleNotFoundError.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{name} can't be loaded as a target: {reason}") from error
