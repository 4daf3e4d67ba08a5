"""A drafter that knows several texts, for batches of them."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3

from dspine_mlx.batch.draft_rows import DraftRows
from dspine_mlx.drafters.dflash import DFlash, DrafterConfig
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.proposal import Proposal
from dspine_mlx.drafters.proposals import Proposals
from dspine_mlx.target.model import Target
from tests.support.tiny import SCRIPTS, VOCABULARY, Script, drafter_config, randomise


@dataclass(eq=False)
class ScriptedTexts(Drafter):
    """It drafts whichever of its texts has the anchor where the caches say, by a script. If none
    has, it fails, or drafts something wrong where rows of the context may be left out."""

    texts: list[list[int]] = field(default_factory=list)
    script: Script = lambda position, right: right
    calls: int = 0
    slots: list[int] = field(default_factory=list)  # of each proposal
    whole_context: bool = True

    def propose_texts(
        self,
        anchors: mx.array,
        features: mx.array,
        cache: list[DraftRows],
        slots: int | None = None,
    ) -> Proposals:
        self.calls += 1
        self.slots.append(slots or self.config.num_proposals)
        lengths = cache[0].lengths
        if features.shape[1]:
            self.extend(features, cache)
        positions = lengths.anchors.tolist()
        texts = zip(anchors.tolist(), positions, strict=True)
        return Proposals([self.scripted(*at) for at in texts])

    def propose(self, anchor: int | mx.array, features: mx.array, cache: list[Any]) -> Proposal:
        """For a text that is decoded alone."""
        self.slots.append(self.config.num_proposals)
        if features.shape[1]:
            self.extend(features, cache)
        return self.scripted(int(mx.array(anchor).item()), cache[0].offset)

    def scripted(self, anchor: int, position: int) -> Proposal:
        known = [text for text in self.texts if position < len(text) and text[position] == anchor]
        assert known or not self.whole_context, (anchor, position)
        M, K = self.slots[-1], self.config.top_k
        right = known[0][position + 1 : position + 1 + M] if known else []
        right = right + [0] * (M - len(right))
        others = [(right[0] + 7 * k) % VOCABULARY for k in range(1, K)]
        candidates = mx.array([[token, *others] for token in self.script(position, right)])
        falling = -mx.arange(K, dtype=mx.float32)
        return Proposal(candidates, falling, mx.broadcast_to(falling, (M - 1, K, K)))


def scripted_texts(
    model: nn.Module,
    texts: list[list[int]],
    script: str = "now and then",
    config: DrafterConfig | None = None,
) -> ScriptedTexts:
    if config is None:
        config = DrafterConfig.from_dict(drafter_config(num_hidden_layers=1))
    network, target = randomise(DFlash(config), 5), Target(model)
    return ScriptedTexts(network, target, target, texts=texts, script=SCRIPTS[script])


class Counting(qwen3.Model):
    """A target that notes the shapes of the tokens it is fed."""

    shapes: list[tuple[int, ...]]

    @classmethod
    def like(cls, model: qwen3.Model) -> "Counting":
        counting = cls(model.args)
        counting.update(model.parameters())
        counting.shapes = []
        return counting

    def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        self.shapes.append(tuple(inputs.shape))
        return super().__call__(inputs, *args, **kwargs)


# A family is known by the module of its class.
Counting.__module__ = qwen3.Model.__module__
