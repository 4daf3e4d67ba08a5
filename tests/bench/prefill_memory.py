"""Peak memory of a 4,000-token prefill, with and without a drafter, on a model with random weights.

    python -m tests.bench.prefill_memory

Prints plain mlx-lm's peak, ours, the drafter's own cache, and ours / (plain + that cache).
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.dspine import DSpine, DSpineConfig
from dspine_mlx.round.decode import Prefill, decode
from dspine_mlx.round.policy import Fixed
from dspine_mlx.round.text import Text
from dspine_mlx.target.model import Target

TOKENS, LAYERS = 4000, 10
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}


def random_pair(
    shape: dict[str, Any], layers: int, drafter_settings: dict[str, Any]
) -> tuple[nn.Module, Drafter]:
    """A Qwen3 target of this shape and a DSpine drafter for it, with random weights."""
    extra = {"model_type": "qwen3", "num_hidden_layers": layers, "max_position_embeddings": 8192}
    model = qwen3.Model(qwen3.ModelArgs.from_dict(shape | extra | {"tie_word_embeddings": True}))
    config = {"block_size": 16, "mask_token_id": 3, "target_layer_ids": [1, 3, 5, 7, 9]}
    network = DSpine(DSpineConfig.from_dict(shape | config | drafter_settings))
    mx.eval(model.parameters(), network.parameters())
    return model, network.bind(Target(model))


def peak(run: object) -> int:
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    next(run)  # type: ignore[call-overload]
    return mx.get_peak_memory() - before


def main() -> None:
    settings = {"num_hidden_layers": 3, "transfer_rank": 64, "message_size": 32}
    model, drafter = random_pair(SHAPE, LAYERS, settings)
    prompt = mx.random.randint(4, SHAPE["vocab_size"], (TOKENS,))
    plain = peak(generate_step(prompt, model, max_tokens=4, prefill_step_size=512))
    cache = make_prompt_cache(model) + drafter.make_cache()
    ours = peak(
        decode(
            prompt,
            lambda: Text(drafter, cache),
            lambda: Fixed(15),
            mx.default_stream(mx.default_device()),
            Prefill(512, {}, lambda *_: None),
            budget=4,
        )
    )
    own = sum(c.nbytes for c in cache[LAYERS:])
    weights = sum(p.nbytes for _, p in tree_flatten(model.parameters()))
    print(f"target weights {weights / 1e6:.0f} MB, prompt {TOKENS} tokens, chunks of 512")
    print(f"plain {plain / 1e6:.1f} MB, with drafter {ours / 1e6:.1f} MB")
    print(f"the drafter's own cache {own / 1e6:.1f} MB")
    print(f"ratio {ours / (plain + own):.3f}")


if __name__ == "__main__":
    main()
