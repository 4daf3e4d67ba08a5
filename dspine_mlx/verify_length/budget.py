"""What drafting has brought so far, against plain decoding: when to give it up for now."""

from dataclasses import dataclass

LEAST, FIRST, MOST = 1.0, 7.0, 16.0  # plain tokens that drafting may owe: limits, and at first
TRUST = 0.2  # of the tokens it has saved, it may owe as many more


@dataclass
class Ledger:
    """Plain tokens won and lost by rounds, from the tokens that they really brought and the seconds
    that they are expected to take.

    Single rounds tell little: a hard sentence must not stop a drafter that pays. So losses add up
    and gains pay them back (a one-sided cumulative sum, Page 1954); drafting stops when it owes
    more than it may. Calibration has no part in it. Drafting that stops without having saved
    anything may owe a quarter as much the next time.
    """

    allowance: float = FIRST
    owed: float = 0.0
    saved: float = 0.0

    def round_over(self, tokens: int, seconds: float, plain: float) -> None:
        """A round brought tokens; plain: seconds of a plain token."""
        gain = tokens - seconds / plain
        self.owed = max(0.0, self.owed - gain)
        self.saved = max(0.0, self.saved + gain)

    @property
    def overdrawn(self) -> bool:
        return self.owed > min(MOST, self.allowance + TRUST * self.saved)

    def close(self) -> None:
        """Drafting stops; when it comes back it starts anew."""
        self.allowance = FIRST if self.saved > 0 else max(LEAST, self.allowance / 4)
        self.owed = self.saved = 0.0
