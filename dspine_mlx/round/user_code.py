"""Functions that the user gives: what they return is checked before MLX computes with it.

MLX reads outside an embedding for an id past its end, and has other words for wrong shapes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor, greedy_sampler
from mlx_lm.sample_utils import Sampler as SamplerFunction

from dspine_mlx.errors import InputError
from dspine_mlx.round.sampler import Sampler


@dataclass(frozen=True)
class UserSampler:
    """A sampler of unknown make. Of its tokens [n] for logprobs [n, V], the kind is checked at
    once. Their values are checked when they are read (`picked`), which may be after the next
    forward was started; `within` is what that forward is fed."""

    function: SamplerFunction

    def __call__(self, logprobs: mx.array) -> mx.array:
        tokens: Any = self.function(logprobs)
        if not isinstance(tokens, mx.array):
            raise InputError(
                f"the sampler returned {tokens!r}; it must return an mx.array of token ids"
            )
        if tokens.shape != logprobs.shape[:-1] or not mx.issubdtype(tokens.dtype, mx.integer):
            raise InputError(
                f"the sampler returned a {tokens.dtype} array of shape {tokens.shape}; it must "
                f"return one of integers of shape {logprobs.shape[:-1]}"
            )
        return tokens


def user_sampler(sampler: SamplerFunction | None) -> SamplerFunction:
    """The sampler, with checks if it is not one of the package's; greedy if there is none, or if
    its temperature is 0."""
    if sampler is None or (isinstance(sampler, Sampler) and sampler.temp == 0):
        return greedy_sampler
    if sampler is greedy_sampler or isinstance(sampler, Sampler | UserSampler):
        return sampler
    return UserSampler(sampler)


def within(tokens: mx.array, vocabulary: int, sampler: SamplerFunction) -> mx.array:
    """Tokens that can be fed before they were read: an id outside the vocabulary is moved in."""
    if isinstance(sampler, UserSampler):
        return mx.clip(tokens, 0, vocabulary - 1)
    return tokens


def picked(token: int, vocabulary: int) -> int:
    """A token that was read, if there is such an id."""
    if 0 <= token < vocabulary:
        return token
    raise InputError(
        f"the sampler returned the token id {token}; the target has ids from 0 to {vocabulary - 1}"
    )


@dataclass
class FedByMLX:
    """A sampler for mlx-lm's own loop, which feeds tokens before it yields them: in the order of
    its calls, `read` returns each token as the user's sampler picked it."""

    sampler: SamplerFunction
    waiting: deque[mx.array] = field(default_factory=deque)
    vocabulary: int = 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        tokens = self.sampler(logprobs)
        self.vocabulary = logprobs.shape[-1]
        self.waiting.append(tokens)
        return within(tokens, self.vocabulary, self.sampler)

    def read(self) -> int:
        return picked(self.waiting.popleft().item(), self.vocabulary)


@dataclass(frozen=True)
class UserProcessor:
    """A logits processor, which must return logits of the kind that it was given."""

    function: LogitsProcessor

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        changed: Any = self.function(tokens, logits)
        if not isinstance(changed, mx.array):
            raise InputError(
                f"a logits processor returned {changed!r}; it must return an mx.array of logits"
            )
        if changed.shape != logits.shape or not mx.issubdtype(changed.dtype, mx.floating):
            raise InputError(
                f"a logits processor returned a {changed.dtype} array of shape {changed.shape}; it "
                f"must return logits of shape {logits.shape}"
            )
        return changed


def user_processors(processors: list[LogitsProcessor] | None) -> list[LogitsProcessor]:
    return [UserProcessor(processor) for processor in processors or ()]


def permitted(
    draft_filter: Callable[[mx.array, list[int]], int], seen: mx.array, draft: list[int]
) -> int:
    """How many of the draft's tokens the user's filter lets through."""
    count: Any = draft_filter(seen, draft)
    if type(count) is not int or not 0 <= count <= len(draft):
        raise InputError(
            f"draft_filter returned {count!r} for a draft of {len(draft)} tokens; it must return "
            "how many of them to verify"
        )
    return count
