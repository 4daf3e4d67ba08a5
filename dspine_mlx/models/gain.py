"""The gain to expect of a drafter here: predicted from published acceptance and measured costs."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine_mlx.checkpoints.files import read_json
from dspine_mlx.models.registry import Entry, Published
from dspine_mlx.target.facts import parameter_bytes
from dspine_mlx.verify_length.costs import Curve
from dspine_mlx.verify_length.store import costs_on_file

DEPTH = 512  # positions of context that the prediction is for
SAME = 0.03  # relative difference of two sizes that are taken for the same


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
    config = read_json(target / "config.json")
    text: dict[str, Any] = config | (config.get("text_config") or {})
    size = parameter_bytes(target) / 1e9
    layers, hidden = text.get("num_hidden_layers"), text.get("hidden_size")
    for costs in costs_on_file():
        found = re.fullmatch(
            r"(\w+), (\d+) layers of (\d+), (\S+) GB, with (\w+), \d+ layers, (\d+) proposals",
            costs.pair,
        )
        if costs.curve is None or costs.problem or found is None:
            continue
        family, n, d, gigabytes, network, proposals = found.groups()
        same = (family, int(n), int(d)) == (config.get("model_type"), layers, hidden)
        alike = network.lower() == entry.method.replace("_", "") and entry.block is not None
        if same and alike and abs(float(gigabytes) / size - 1) < SAME + 0.05 / float(gigabytes):
            if int(proposals) in (entry.block, (entry.block or 0) - 1):
                return costs.curve
    return None


def gain(target: Path | None, entry: Entry) -> Gain | None:
    """The best prediction for a target that is here; None where nothing is measured or
    published."""
    if target is None:
        return None
    curve = measured_curve(target, entry)
    if curve is None:
        return None
    gains = [g for p in entry.published if (g := predict(curve, p)) is not None]
    return max(gains, key=lambda g: g.speedup) if gains else None
