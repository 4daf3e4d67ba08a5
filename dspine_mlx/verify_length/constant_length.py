"""Does choosing lengths from evidence gain more than reading it costs?"""

from collections.abc import Sequence

READING = 4e-4  # seconds that reading costs per round: host and device wait for each other
ALWAYS, EVERY = 32, 8  # rounds read at first; then at least one in EVERY
MEMORY = 40  # rounds over which values fade


class ConstantLength:
    """Compares the net seconds of the best constant length with those of lengths chosen per block.

    Where rounds are short and rows cost almost nothing, or all blocks are about equally easy, a
    constant length is faster.
    """

    def __init__(self, slots: int):
        self.values = [0.0] * (slots + 1)  # net seconds by length, fading
        self.chosen = 0.0  # the same of the chosen lengths
        self.weight = 0.0  # of the rounds in these sums
        self.rounds = 0

    @property
    def reading_due(self) -> bool:
        """Whether to read the next round's evidence."""
        pays = self.chosen - max(self.values) > READING * self.weight
        return pays or self.rounds < ALWAYS or self.rounds % EVERY == 0

    @property
    def length(self) -> int:
        """The length to offer without reading."""
        return self.values.index(max(self.values))

    def round_over(self, values: Sequence[float], length: int) -> None:
        """Take note of a round that offered `length` tokens; values: net seconds of lengths 0 ..
        M."""
        keep = 1 - 1 / MEMORY
        self.values = [keep * old + new for old, new in zip(self.values, values, strict=True)]
        self.chosen = keep * self.chosen + values[length]
        self.weight = keep * self.weight + 1
