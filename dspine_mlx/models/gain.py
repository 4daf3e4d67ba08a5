"""The gain to expect of a drafter here: predicted from published acceptance and measured costs."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.utils import MODEL_REMAPPING

from dspine_mlx.checkpoints.files import read_config, read_tensors
from dspine_mlx.drafters import METHODS
from dspine_mlx.models.registry import Entry, Published
from dspine_mlx.verify_length.costs import Curve
from dspine_mlx.verify_length.on_file import costs_on_file

DEPTH = 512  # positions of context that the prediction is for
SAME = 0.06  # relative difference of sizes taken for the same; one has two digits
PAIR = re.compile(  # as `store.describe` writes it
    r"(\w+), (\d+) layers of (\d+), (\S+) GB, with (\w+), \d+ layers, (\d+) proposals"
)


@dataclass(frozen=True)
class Gain:
    """A prediction: times the speed of plain decoding, at the best verify length."""

    speedup: float
    length: int  # drafted tokens offered per round
    tokens_per_round: float
    published: Published

    def words(self) -> str:
        return (
            f"predicted {self.speedup:.2f} times plain decoding's speed, offering {self.length} "
            f"per round ({self.tokens_per_round:.2f} tokens per round), from costs measured here "
            f"and {self.published.tokens_per_round} tokens per round on {self.published.texts} "
            f"({self.published.where})"
        )


def predict(curve: Curve, published: Published, depth: int = DEPTH) -> Gain | None:
    """The best verify length under one chance per token for all slots.

    With the chance c that a drafted token is accepted after accepted ones, a round that offers l
    gives 1 + c + ... + c^l tokens, and c is what makes that the published figure. A round takes one
    draft and a forward over l + 1 rows. None where it isn't published how many were offered.
    """
    if published.offered is None:
        return None
    c = chance(published.tokens_per_round, published.offered)
    plain, *verify, draft = curve.at(depth)
    lengths = range(len(verify))
    tokens = [sum(c**i for i in range(n + 1)) for n in lengths]
    speeds = [plain * tokens[n] / (draft + verify[n]) for n in lengths]
    best = max(lengths, key=speeds.__getitem__)
    return Gain(speeds[best], best, tokens[best], published)


def chance(tokens_per_round: float, offered: int) -> float:
    """c with 1 + c + ... + c^offered = tokens_per_round, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        total = sum(middle**i for i in range(offered + 1))
        low, high = (middle, high) if total < tokens_per_round else (low, middle)
    return low


def measured_curve(target: Path, entry: Entry) -> Curve | None:
    """The costs on file of this target, on this machine, with a drafter like the entry's.

    Costs are on file under a pair's sizes. They count if the target's family, layers and bytes
    agree, and the drafter's method and number of proposals, which decide what a draft takes.
    """
    if entry.method not in METHODS or entry.block is None:
        return None
    config = read_config(target)
    text: dict[str, Any] = config | (config.get("text_config") or {})
    size = sum(tensor.nbytes for tensor in read_tensors(target).values()) / 1e9
    network = METHODS[entry.method].network.__name__
    kind = str(config.get("model_type"))
    family = MODEL_REMAPPING.get(kind, kind)
    wanted = (family, text.get("num_hidden_layers"), text.get("hidden_size"))
    for costs in costs_on_file():
        found = PAIR.fullmatch(costs.pair)
        if costs.curve is None or costs.problem or found is None:
            continue
        same = (found[1], int(found[2]), int(found[3])) == wanted and found[5] == network
        proposals = int(found[6]) in (entry.block, entry.block - 1)
        if same and proposals and abs(float(found[4]) / size - 1) < SAME:
            return costs.curve
    return None


def gains(target: Path | None, entry: Entry) -> list[Gain]:
    """A prediction for each published figure, for a target that is here and was measured."""
    curve = None if target is None else measured_curve(target, entry)
    if curve is None:
        return []
    return [g for p in entry.published if (g := predict(curve, p)) is not None]
