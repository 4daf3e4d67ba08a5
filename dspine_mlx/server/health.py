"""The answer to GET /health."""

from typing import Any

import mlx.core as mx
import mlx_lm

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.server.generator import ResponseGenerator
from dspine_mlx.target.model import VerifyKernels

LONG_STEP = 10.0  # seconds


def health(generator: ResponseGenerator) -> dict[str, Any]:
    """status: ok; busy (loading, or in a long step); stalled (no step for --stall-seconds) or
    unavailable (the generation thread has ended), which both come with HTTP's 503."""
    provider = generator.model_provider
    draft, drafter = next(iter(provider.drafters.items()), (None, None))
    return {
        "status": status(generator),
        "seconds_since_step": round(generator.calls.heart.age, 1),
        "loading": provider.loading,
        "loaded": provider.model is not None,
        "model": provider.model_key[0] if provider.model_key else None,
        "draft_model": draft,
        "drafter": type(drafter.network).__name__ if drafter is not None else None,
        "verify_length": generator.options.verify_length,
        "kernels": kernels(generator.options.kernels, drafter),
        "verify_rows": drafter.target.verify_kernels.promise() if drafter is not None else None,
        "verify_kernels": in_use(drafter.target.verify_kernels) if drafter is not None else [],
        "requests": len(generator.calls),
        "versions": {
            "dspine_mlx": dspine_mlx.__version__,
            "mlx_lm": mlx_lm.__version__,
            "mlx": mx.__version__,
        },
    }


def status(generator: ResponseGenerator) -> str:
    if not generator.generation_available():
        return "unavailable"
    if generator.stalled:
        return "stalled"
    return "ok" if generator.calls.heart.age < LONG_STEP else "busy"


def in_use(kernels: VerifyKernels) -> list[str]:
    """The names of what verify rows are made by, besides MLX's own."""
    verdicts = kernels.report().get("verdicts", [])
    return sorted({verdict["product"]["kernel"] for verdict in verdicts} - {"stock", "apart"})


def kernels(mode: str, drafter: Drafter | None) -> dict[str, Any]:
    """Whether Metal kernels are on, why or why not, and the results of their checks."""
    checks = drafter.kernels.report()["checks"] if drafter is not None else []
    if mode == "off":
        why = "switched off by --kernels off"
    elif not mx.metal.is_available():
        why = "this machine has no Metal; plain MLX operations are used"
    elif drafter is None:
        why = "no drafter is loaded"
    else:
        return {"on": True, "why": "each kernel that passes its check runs", "checks": checks}
    return {"on": False, "why": why, "checks": checks}
