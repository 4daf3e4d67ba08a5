"""Settings of mlx-lm's samplers and logits processors, one of each kind."""

from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

SAMPLERS: dict[str, dict[str, Any]] = {
    "temperature": {"temp": 0.8},
    "top-p": {"temp": 0.9, "top_p": 0.8},
    "top-k": {"temp": 1.2, "top_k": 20},
    "min-p": {"temp": 0.9, "min_p": 0.05},
    "xtc": {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.01},
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "bias": {"logit_bias": {20: 5.0, 99: -3.0}},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": 0.7},
    "all": {"logit_bias": {7: 2.0}, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
}


def seeded_options(processors: str, max_tokens: int) -> dict[str, Any]:
    """Options of one more text with the same seed, and processors that have seen nothing yet."""
    mx.random.seed(5)
    made = make_logits_processors(**PROCESSORS[processors])
    return {"max_tokens": max_tokens, "logits_processors": made}
