"""What GET /health says."""

from typing import Any

import mlx.core as mx
import mlx_lm

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.server.generator import ResponseGenerator


def health(generator: ResponseGenerator) -> dict[str, Any]:
    """status: ok, stalled (generation makes no steps) or unavailable (it has ended)."""
    provider = generator.model_provider
    draft, drafter = next(iter(provider.drafters.items()), (None, None))
    status = "ok" if generator.is_healthy else "unavailable"
    return {
        "status": "stalled" if generator.generation_available() and generator.stalled else status,
        "seconds_since_step": round(generator.calls.heart.age, 1),
        "loading": provider.loading,
        "loaded": provider.model is not None,
        "model": provider.model_key[0] if provider.model_key else None,
        "draft_model": draft,
        "drafter": type(drafter.network).__name__ if drafter is not None else None,
        "verify_length": generator.options.verify_length,
        "kernels": kernels(generator.options.kernels, drafter),
        "requests": len(generator.calls),
        "versions": {
            "dspine_mlx": dspine_mlx.__version__,
            "mlx_lm": mlx_lm.__version__,
            "mlx": mx.__version__,
        },
    }


def kernels(mode: str, drafter: Drafter | None) -> dict[str, Any]:
    """Whether Metal kernels are on, why or why not, and what their checks said."""
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
