"""How much of a newcomer's prompt is prefilled between two steps of the running texts."""

STEPS = 2  # plain steps that a chunk may take; with their own step, running texts wait for three
FIRST = 32  # tokens of the first chunk, before any was timed
LEAST = 8  # tokens of a chunk, however long they take: the newcomer has to get on


class Pace:
    """Chunks that take as long as so many plain steps, by what earlier chunks took."""

    def __init__(self) -> None:
        self.token_seconds: float | None = None  # of the newest chunk

    def tokens(self, plain: float | None, most: int) -> int:
        """Tokens of the next chunk, at most `most`; plain: seconds of the running texts' plain
        step, None if no text is running."""
        if plain is None:
            return most
        tokens = FIRST if self.token_seconds is None else int(STEPS * plain / self.token_seconds)
        return max(1, min(most, max(LEAST, tokens)))

    def learn(self, tokens: int, seconds: float) -> None:
        """A chunk took so long. What a forward costs at any length is in it, so chunks that were
        too short grow, and those that were too long shrink, to the right size."""
        self.token_seconds = seconds / tokens
