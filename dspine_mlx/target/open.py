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

from dspine_mlx.checkpoints.files import read_config
from dspine_mlx.errors import InputError

COUNTS = {
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_nextn_predict_layers"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
}
MOST = 4096
LONGEST = 1 << 40  # positions of a context


def open_target(folder: Path, name: str, **options: Any) -> tuple[nn.Module, TokenizerWrapper]:
    """Load an mlx-lm model, checked by a call, and its tokenizer; options are mlx_lm.load's.

    name: what the user calls the folder. A forward over one token is built, not run, and one text
    is tokenised. They find values that no constructor looks at, such as a string for a norm's
    epsilon.
    """
    with opening(name):
        check_config(read_config(folder))
        model, tokenizer = mlx_lm.load(str(folder), **options)
        tokenizer.encode("a")
        model(mx.array([[0]]), cache=make_prompt_cache(model))
    return model, tokenizer


def check_config(config: dict[str, Any]) -> None:
    """Check what is read here, and bound what models are built of one by one: a billion layers
    would fill the memory first."""
    text = config.get("text_config")
    if not isinstance(text, dict | None):
        raise InputError(f"text_config is {text!r}; it must be an object")
    for values in (config, text or {}):
        context = values.get("max_position_embeddings")
        if context is not None and not (
            isinstance(context, int | float) and 1 <= context < LONGEST
        ):
            raise InputError(f"max_position_embeddings is {context!r}; it must be a number from 1")
        for name in ("rope_scaling", "rope_parameters"):
            check_scaling(name, values.get(name))
    for values in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in COUNTS & values.keys():
            if isinstance(values[name], int | float) and values[name] > MOST:
                raise InputError(f"{name} is {values[name]}; no model has more than {MOST}")


def check_scaling(name: str, scaling: Any) -> None:
    """Check the numbers that say how long a context may be."""
    if not isinstance(scaling, dict | None):
        raise InputError(f"{name} is {scaling!r}; it must be an object")
    for key in ("factor", "original_max_position_embeddings"):
        number = (scaling or {}).get(key)
        if number is not None and not (type(number) in (int, float) and 0 < number < LONGEST):
            raise InputError(f"{name} has {key} {number!r}; it must be a number above 0")


@contextmanager
def opening(name: str) -> Iterator[None]:
    """Turn whatever mlx-lm or transformers raise into an `InputError` that names the folder.

    The exception's type does not show whose fault it is: zero heads raise ZeroDivisionError, a
    missing key TypeError, an unknown tool parser ModuleNotFoundError.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{name} can't be loaded as a target: {error}") from error
    except Exception as error:  # noqa: BLE001
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{name} can't be loaded as a target: {reason}") from error
