"""Plain tokens that drafting may still lose: when it stops, and when it is tried again."""

from dataclasses import dataclass

START, CARRIED, CAP = 4.0, 12.0, 16.0  # plain tokens: at first, into a new text, and at most
SHARE = 0.01  # of the time, at most, for drafts made while parked
FIRST_WAIT, LAST_WAIT = 16, 64  # plain tokens between two of them, doubled by each that fails


@dataclass
class Budget:
    """One balance, in the time of plain tokens.

    Drafting starts with a credit of START. Rounds pay in what they save and take out what they
    lose: their tokens less their seconds in plain tokens. When the balance no longer covers another
    round like the last one, drafting stops. A draft that is only watched books half of what its
    round would have won. A balance of one plain token starts drafting again. So does a new text,
    with half of the last credit until drafting has earned START again. What is left at a text's
    end, CARRIED at most, is the next one's.
    """

    balance: float = START
    credit: float = START  # when drafting starts again
    wait: int = FIRST_WAIT  # plain tokens between probes
    since: int = 0  # plain tokens since the last draft
    eager: bool = False  # whether the next probe waits for SHARE only

    def __post_init__(self) -> None:
        waits = FIRST_WAIT <= self.wait <= LAST_WAIT and self.since >= 0
        if not (0 <= self.balance <= CAP and 0 <= self.credit <= START and waits):
            raise ValueError("a budget is out of range")

    @property
    def spent(self) -> bool:
        return self.balance < 1

    def start_text(self, draft: float) -> None:
        """A new text; a draft takes `draft` plain tokens."""
        self.balance = min(CARRIED, self.balance)
        if self.spent:
            self.eager = True
            if self.credit >= 1 and self.affords(draft):
                self.balance = self.credit

    def round_over(self, gain: float) -> None:
        """A round won `gain` plain tokens' time, or lost it."""
        self.balance = min(CAP, self.balance + gain)
        if self.balance >= START:
            self.credit, self.wait = START, FIRST_WAIT
        if self.balance < max(1.0, -gain):
            self.close()

    def close(self) -> None:
        self.credit /= 2
        self.balance, self.since, self.eager = 0.0, 0, False

    def affords(self, draft: float) -> bool:
        return SHARE * self.since >= draft

    def probe_due(self, draft: float) -> bool:
        return self.affords(draft) and (self.eager or self.since >= self.wait)

    def probe_over(self, gain: float) -> None:
        """A round in the watched draft's place would have won `gain` plain tokens' time."""
        self.eager = gain > 0
        if gain > 0:
            self.balance = min(START, self.balance + gain / 2)
            if not self.spent:
                self.balance = max(self.balance, self.credit)
        else:
            self.balance = max(0.0, self.balance + gain)
            self.wait = min(2 * self.wait, LAST_WAIT)
