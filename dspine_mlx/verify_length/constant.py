"""One length for every block, where choosing it block by block gains too little."""

from collections.abc import Sequence

MEMORY = 32  # rounds over which sums fade
READ = 16  # rounds whose evidence is read before a judgement
UNREAD, MOST = 64, 256  # rounds whose evidence is not read after it: at first, and in the end
READING = 4e-4  # seconds that reading takes from a round
LOSS = 0.01  # share of the time that reading must lose to be given up


class Constant:
    """The best constant length, against lengths chosen from evidence.

    To read a draft's evidence the host waits for the draft, and the device then for the host. Where
    rounds are short and rows cost almost nothing, or all blocks are about as easy, that takes more
    than it brings. The worth of every length of a block is what `rules` maximises:
    seconds that its tokens save, less those of its rows. When reading has lost recent rounds more
    than LOSS of their time, because the chosen lengths were worth too little beyond the best
    constant one, the next UNREAD rounds offer that one; if the READ rounds after them say the same,
    twice as many do, up to MOST.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self.length, self.unread, self.pause = slots, 0, UNREAD
        self.forget()

    def forget(self) -> None:
        self.values = [0.0] * (self.slots + 1)  # by length: sums over rounds, fading
        self.brought = 0.0  # the same of the chosen lengths, less what reading takes
        self.seconds = 0.0  # of the rounds, fading
        self.read = 0

    def round_over(self, values: Sequence[float], length: int, seconds: float) -> None:
        """A round over a whole block took some seconds and offered `length` tokens; values: what
        lengths 0 .. M were worth, in seconds."""
        keep = 1 - 1 / MEMORY
        self.values = [keep * old + new for old, new in zip(self.values, values, strict=True)]
        self.brought = keep * self.brought + values[length] - READING
        self.seconds = keep * self.seconds + seconds
        self.read += 1
        if self.read % READ == 0:
            self.judge()

    def judge(self) -> None:
        best = max(self.values)
        if self.brought - best >= -LOSS * self.seconds:
            self.pause = UNREAD
            return
        self.length, self.unread = self.values.index(best), self.pause
        self.pause = min(2 * self.pause, MOST)
        self.forget()
