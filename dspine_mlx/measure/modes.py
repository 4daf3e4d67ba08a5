"""Names of what bench compares."""

from dspine_mlx.errors import InputError

PLAIN, AUTO, MLX_LM = "plain", "auto", "mlx-lm-draft:"


def verify_length(mode: str) -> int | str | None:
    """The verify length of `auto` and `fixed:N`; None for mlx-lm's own modes."""
    if mode == PLAIN or (mode.startswith(MLX_LM) and mode != MLX_LM):
        return None
    kind, _, number = mode.partition(":")
    if mode != AUTO and (kind != "fixed" or not is_length(number)):
        raise InputError(
            f"can't compare {mode!r}; modes are plain, auto, fixed:N and mlx-lm-draft:MODEL"
        )
    return AUTO if mode == AUTO else int(number)


def is_length(number: str) -> bool:
    return number.isascii() and number.isdecimal() and len(number) < 10
