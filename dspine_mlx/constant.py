"""One length for every block, where choosing it block by block gains too little."""

from collections.abc import Sequence

MEMORY = 32  # rounds over which sums fade
READ, UNREAD = 16, 64  # rounds whose evidence is read before a judgement, and not read after it
READING = 4e-4  # seconds that reading takes from a round


class Constant:
    """The best constant length, against lengths chosen from evidence.

    To read a draft's evidence the host waits for the draft, and the device then for the host. Where
    rows cost almost nothing, or all blocks are about as easy, that takes more than it brings. The
    worth of every length of a block is what `dspine_mlx.lengths` maximises: seconds that its tokens
    save, less those of its rows. When the chosen lengths of recent rounds were worth less than
    READING seconds a round more than the best constant one, the next UNREAD rounds offer that one.
    """

    def __init__(self, slots: int):
        self.values = [0.0] * (slots + 1)  # by length: sums over rounds, fading
        self.chosen = self.rounds = 0.0
        self.length, self.read, self.unread = slots, 0, 0

    def round_over(self, values: Sequence[float], length: int) -> None:
        """A whole block whose lengths 0 .. M are worth these seconds offered `length` tokens."""
        keep = 1 - 1 / MEMORY
        self.values = [keep * old + new for old, new in zip(self.values, values, strict=True)]
        self.chosen, self.rounds = keep * self.chosen + values[length], keep * self.rounds + 1
        self.read += 1
        if self.read >= READ:
            best = max(self.values)
            if self.chosen - best < READING * self.rounds:
                self.length, self.unread = self.values.index(best), UNREAD
            self.read = 0
