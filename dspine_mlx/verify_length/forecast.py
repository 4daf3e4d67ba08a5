"""What tokens and rounds are worth now: costs, chances, and the speed of recent rounds."""

from dspine_mlx.verify_length.calibration import Calibration
from dspine_mlx.verify_length.chances import Chances
from dspine_mlx.verify_length.costs import Costs
from dspine_mlx.verify_length.records import Evidence, Round
from dspine_mlx.verify_length.rules import length_values, sampled_verify_length, token_values

HOPE = 1.1  # speed that perfect drafts must reach for drafting to be tried
MEMORY = 16  # rounds over which tokens and seconds fade


class Forecast:
    """A pair's costs and chances. `rate` is what a round has to beat."""

    def __init__(self, costs: Costs, calibration: Calibration):
        self.costs, self.chances = costs, Chances(calibration)
        self.slots = len(calibration.biases)
        self.tokens = self.seconds = 0.0  # of recent rounds, fading

    def count(self, tokens: float, seconds: float, fading: float = 1 / MEMORY) -> None:
        """Take a round into the running sums."""
        self.tokens = (1 - fading) * self.tokens + tokens
        self.seconds = (1 - fading) * self.seconds + seconds

    def rate(self, depth: int) -> float:
        """Tokens per second of recent rounds, or of plain decoding where that is faster."""
        plain = 1 / self.costs.plain(depth)
        return max(plain, self.tokens / self.seconds) if self.seconds else plain

    def hopeless(self, depth: int) -> bool:
        """Whether plain decoding wins even if all drafted tokens are accepted: by the times of real
        rounds, perfect ones are not HOPE times as fast."""
        if not self.slots:
            return True
        best = max((1 + n) / self.costs.round(n, depth) for n in range(self.slots + 1))
        return self.costs.seen["draft"] > 0 and best * self.costs.plain(depth) < HOPE

    def token_values(self, chances: list[float], limit: int, depth: int) -> list[float]:
        """Seconds that each of the next `limit` tokens saves, if they have these chances."""
        plain, draft = self.costs.plain(depth), self.costs.draft(depth)
        # No block goes on beyond the text's last tokens.
        rate = self.rate(depth) if limit >= len(chances) else 1 / plain
        return token_values(chances[:limit], self.costs.verify(depth), draft, plain, rate)

    def choose(self, known: Evidence, limit: int, depth: int, sampled: bool) -> Round:
        """The round of the best length; `limit` is smaller near max_tokens."""
        chances = self.chances.of(known.odds)
        greedy = chances if known.greedy is known.odds else self.chances.of(known.greedy)
        chances, seconds = chances[:limit], self.costs.verify(depth)
        w = self.token_values(greedy, limit, depth)
        values = length_values(chances, seconds, w)
        length = values.index(max(values))
        if sampled:
            length = sampled_verify_length(chances, greedy, seconds, w)
        return Round(depth, chances=chances, values=values, chosen=length)
