"""Opening a target: mlx-lm's load, for untrusted folders."""

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
    """Load an mlx-lm model, checked by a call, and its tokenizer; options are mlx_lm.load's.

    name: what the user calls the folder. A forward over one token is built, not run. It finds
    values that no constructor looks at, such as a string for a norm's epsilon.
    """
    with opening(name):
        model, tokenizer = mlx_lm.load(str(folder), **options)
        model(mx.array([[0]]), cache=make_prompt_cache(model))
    return model, tokenizer


@contextmanager
def opening(name: str) -> Iterator[None]:
    """Turn whatever mlx-lm or transformers raise into an `InputError` that names the folder.

    The exception's type does not show whose fault it is: zero heads raise ZeroDivisionError, a
    missing key TypeError, an unknown tool parser ModuleNotFoundError.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{name} can't be loaded as a target: {reason}") from error
