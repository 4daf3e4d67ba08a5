"""Tiny models with random weights, scripted drafters, and what tests compare with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_map
from mlx_lm.models import qwen3
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.dspine import DSpine, DSpineConfig
from dspine_mlx.drafters.proposal import Proposal
from dspine_mlx.target.model import Target

VOCABULARY, HIDDEN, LAYERS, MASK = 2048, 32, 4, 3
Step = tuple[int, mx.array]  # token, logprobs


def randomise(model: nn.Module, seed: int, scale: float = 0.2) -> nn.Module:
    key = mx.random.key(seed)

    def draw(parameter: mx.array) -> mx.array:
        nonlocal key
        key, own = mx.random.split(key)
        return mx.random.normal(parameter.shape, key=own) * scale

    model.update(tree_map(draw, model.parameters()))
    return model


def tiny_target(
    seed: int = 0,
    head_dim: int = 8,
    vocab_size: int = VOCABULARY,
    scale: float = 0.2,
    layers: int = LAYERS,
) -> nn.Module:
    args = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        vocab_size=vocab_size,
        max_position_embeddings=4096,
        rope_theta=1e4,
        tie_word_embeddings=True,
    )
    return randomise(qwen3.Model(args), seed, scale)


def drafter_config(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "block_size": 8,
        "mask_token_id": MASK,
        "target_layer_ids": (0, 2),
        "top_k": 4,
    } | changes


def tiny_dflash(model: nn.Module, seed: int = 1, **changes: Any) -> Drafter:
    config = DrafterConfig.from_dict(drafter_config(**changes))
    return randomise(DFlash(config), seed).bind(Target(model))


def tiny_dspine(model: nn.Module, seed: int = 1, **changes: Any) -> Drafter:
    config = drafter_config(transfer_rank=16, message_size=8) | changes
    drafter = randomise(DSpine(DSpineConfig.from_dict(config)), seed).bind(Target(model))
    codes = drafter.network.transfer_codes
    codes.weight = codes.weight / mx.linalg.norm(codes.weight, axis=-1, keepdims=True)
    return drafter


Script = Callable[[int, list[int]], list[int]]


@dataclass(eq=False)
class Scripted(Drafter):
    """A drafter that knows the text: script(position, right) -> the tokens to propose, where right
    are the next M tokens of the text. It fails if the anchor is not where its cache says."""

    text: list[int] = field(default_factory=list)
    script: Script = lambda position, right: right
    rounds: int = 0
    whole_context: bool = True  # else rows may be left out, and drafts are wrong after that

    @classmethod
    def of(cls, network: DFlash, model: nn.Module, text: list[int], name: str) -> "Scripted":
        """One that keeps the network's caches, and drafts by one of SCRIPTS."""
        target = Target(model)
        return cls(network, target, target, text=text, script=SCRIPTS[name])

    def propose(self, anchor: int | mx.array, features: mx.array, cache: list[Any]) -> Proposal:
        if features.shape[1]:
            self.extend(features, cache)
        position = cache[0].offset
        known = mx.array(anchor).item() in self.text[position : position + 1]
        assert known or not self.whole_context
        M, K = self.config.num_proposals, self.config.top_k
        right = self.text[position + 1 : position + 1 + M] if known else []
        right += [0] * (M - len(right))
        others = [(right[0] + 7 * k) % VOCABULARY for k in range(1, K)]
        candidates = mx.array([[token, *others] for token in self.script(position, right)])
        falling = -mx.arange(K, dtype=mx.float32)
        self.rounds += 1
        return Proposal(candidates, falling, mx.broadcast_to(falling, (M - 1, K, K)))


SCRIPTS: dict[str, Script] = {
    "right": lambda position, right: right,
    "wrong": lambda position, right: [(token + 1) % VOCABULARY for token in right],
    "right but the last": lambda position, right: [*right[:-1], (right[-1] + 1) % VOCABULARY],
    "ends early": lambda position, right: [*right[:2], 2, *right[3:]][: len(right)],
    "now and then": lambda position, right: [
        token if (position + i) % 3 else 5 for i, token in enumerate(right)
    ],
}


def scripted(model: nn.Module, text: list[int], name: str, **changes: Any) -> Scripted:
    config = DrafterConfig.from_dict(drafter_config(num_hidden_layers=1, **changes))
    return Scripted.of(randomise(DFlash(config), 5), model, text, name)


def plain_steps(
    model: nn.Module, tokenizer: TokenizerWrapper, prompt: list[int], **options: Any
) -> list[Step]:
    """What mlx-lm itself generates."""
    responses = mlx_lm.stream_generate(model, tokenizer, prompt, **options)
    return [(r.token, r.logprobs) for r in responses]


def same_steps(ours: list[Step], plain: list[Step]) -> bool:
    return [token for token, _ in ours] == [token for token, _ in plain] and all(
        mx.array_equal(a, b) for (_, a), (_, b) in zip(ours, plain, strict=True)
    )


def random_prompt(length: int, seed: int = 3) -> list[int]:
    return mx.random.randint(4, VOCABULARY, (length,), key=mx.random.key(seed)).tolist()
