"""Whether choosing lengths from evidence gains more than reading it takes."""

from collections.abc import Sequence

READING = 4e-4  # seconds that reading takes from a round: host and device wait for each other
ALWAYS, EVERY = 32, 8  # rounds that are read at first; then at least one in EVERY
MEMORY = 40  # rounds over which values fade


class Reading:
    """Net seconds of the best constant length, against those of lengths chosen block by block.

    Where rounds are short and rows cost almost nothing, or all blocks are about as easy, one
    length without looking is faster.
    """

    def __init__(self, slots: int):
        self.values = [0.0] * (slots + 1)  # by length: what it was worth, fading
        self.chosen = 0.0  # the same of the chosen lengths
        self.weight = 0.0  # of the rounds in these sums
        self.rounds = 0

    @property
    def due(self) -> bool:
        """Whether to read the next round's evidence."""
        pays = self.chosen - max(self.values) > READING * self.weight
        return pays or self.rounds < ALWAYS or self.rounds % EVERY == 0

    @property
    def constant(self) -> int:
        """The length to offer without reading."""
        return self.values.index(max(self.values))

    def round_over(self, values: Sequence[float], length: int) -> None:
        """values: net seconds of lengths 0 .. M in a block that was offered `length` tokens."""
        keep = 1 - 1 / MEMORY
        self.values = [keep * old + new for old, new in zip(self.values, values, strict=True)]
        self.chosen = keep * self.chosen + values[length]
        self.weight = keep * self.weight + 1
