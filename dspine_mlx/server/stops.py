"""Stop strings: a reply ends before the first one, however it is tokenised.

mlx_lm.server looks for the tokens of a stop string encoded alone, and misses it where the reply's
tokens join it to its surroundings. Here the text is searched.
"""

from collections.abc import Sequence
from typing import Any, Protocol


class TokenMatcher(Protocol):
    """mlx_lm's matcher of end-of-text tokens."""

    def advance(self, token: int) -> bool: ...


class Stopped:
    """A text that grows until it holds a stop string: `before` is what comes before the first.

    The first is the one that starts first. So text that may still become a stop string is held
    back. So is the text from a stop string on, while one that started earlier may yet be completed.
    """

    def __init__(self, words: Sequence[str]):
        self.words = words
        self.held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Add text; returns the part that is sure to come before a stop string."""
        self.held += text
        first, open_ = self.first(), self.possible()
        if first is not None and (open_ is None or open_ >= first):
            return self.cut(first)
        return self.release(open_)

    def end(self) -> str:
        """End the text and return the rest."""
        first = self.first()
        return self.release(None) if first is None else self.cut(first)

    def first(self) -> int | None:
        places = [place for word in self.words if (place := self.held.find(word)) >= 0]
        return min(places, default=None)

    def possible(self) -> int | None:
        """Start of the longest suffix of the text that begins a stop string."""
        longest = max(map(len, self.words), default=1) - 1
        for place in range(max(0, len(self.held) - longest), len(self.held)):
            end = self.held[place:]
            if any(len(word) > len(end) and word.startswith(end) for word in self.words):
                return place
        return None

    def cut(self, place: int) -> str:
        self.found = True
        before, self.held = self.held[:place], ""
        return before

    def release(self, place: int | None) -> str:
        place = len(self.held) if place is None else place
        text, self.held = self.held[:place], self.held[place:]
        return text


class ReplyText:
    """The text of one reply, token by token; mlx_lm's loops take it for their stop sequences.

    ends: mlx_lm's sequences of end-of-text tokens. detokenizer: mlx_lm's, for this reply alone.
    """

    def __init__(self, words: Sequence[str], ends: Any, detokenizer: Any):
        self.stopped = Stopped(words)
        self.ends, self.detokenizer = ends, detokenizer
        self.ready = ""  # text that can be delivered
        self.ended: TokenMatcher = ends.matcher()

    @property
    def found(self) -> bool:
        return self.stopped.found

    def matcher(self) -> "ReplyText":
        return self

    def advance(self, token: int) -> bool:
        """Add one token; returns whether the reply ends with it."""
        if self.ended.advance(token):
            return True
        self.detokenizer.add_token(token)
        self.ready += self.stopped.add(self.detokenizer.last_segment)
        return self.found

    def take(self, last: bool) -> str:
        """Take the text that can be delivered now; last: all the rest."""
        if last and not self.found:
            self.detokenizer.finalize()
            self.ready += self.stopped.add(self.detokenizer.last_segment)
            if not self.found:
                self.ready += self.stopped.end()
        ready, self.ready = self.ready, ""
        return ready
