"""The user's sampler with its probabilities: mlx-lm's transforms, with their settings in sight."""

from dataclasses import dataclass, fields
from functools import cached_property

import mlx.core as mx
from mlx_lm.sample_utils import (
    Sampler as SamplerFunction,
)
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    apply_xtc,
    make_sampler,
)
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.arguments import INT32, check_flag, check_real, check_temperature, check_whole
from dspine_mlx.errors import InputError


def never_excluded(tokenizer: TokenizerWrapper) -> tuple[int, ...]:
    """The tokens that mlx_lm.generate shields from XTC: a line's end, and those that end a text.
    (Some configs name -1 among the latter.)"""
    tokens = (*tokenizer.encode("\n"), *tokenizer.eos_token_ids)
    return tuple(token for token in tokens if 0 <= token <= INT32)


@dataclass(frozen=True)
class Sampler:
    """mlx_lm.sample_utils.make_sampler, arguments and draws alike, that also states its probs.

    With known probs, drafts can be sampled too and verified by the ratio test. For any other
    callable, drafts can only be compared with its picks (see `dspine_mlx.round.accept`).
    """

    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: tuple[int, ...] = ()
    seeded: bool = False  # draw the very tokens that plain decoding draws with the same seed

    def __post_init__(self) -> None:
        check_temperature(self.temp)
        for name, value in (
            ("top_p", self.top_p),
            ("min_p", self.min_p),
            ("xtc_probability", self.xtc_probability),
        ):
            check_real(name, value, 0, 1)
        check_whole("min_tokens_to_keep", self.min_tokens_to_keep, 1)
        check_whole("top_k", self.top_k, 0)
        check_real("xtc_threshold", self.xtc_threshold, 0, 0.5)
        if not isinstance(self.xtc_special_tokens, tuple | list):
            kind = type(self.xtc_special_tokens).__name__
            raise InputError(f"xtc_special_tokens is a {kind}; it must be a tuple of token ids")
        for token in self.xtc_special_tokens:
            check_whole("a token of xtc_special_tokens", token, 0)
        check_flag("seeded", self.seeded)

    @cached_property
    def function(self) -> SamplerFunction:
        """mlx-lm's own sampler with these settings."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "seeded"}
        return make_sampler(**settings | {"xtc_special_tokens": list(self.xtc_special_tokens)})

    def __call__(self, logprobs: mx.array) -> mx.array:
        return self.function(logprobs)

    def probs(self, logprobs: mx.array) -> mx.array:
        """Float32 probs [n, V] of a draw from each row of logprobs [n, V].

        XTC tosses its coin for every row here; the probs are those given the coin.
        """
        kept = self.truncate(logprobs)
        if self.xtc_probability > 0:
            kept = mx.concatenate([self.exclude_top(row[None]) for row in kept])
        if 0 < self.top_k < kept.shape[-1]:
            kept = apply_top_k(kept, self.top_k)
        return mx.softmax((kept * (1.0 / self.temp)).astype(mx.float32), axis=-1)

    @property
    def truncates(self) -> bool:
        """Whether the probs of drafts are more than a softmax at the temperature."""
        return 0 < self.top_p < 1 or self.min_p != 0 or self.top_k > 0

    def truncate(self, logprobs: mx.array) -> mx.array:
        if 0 < self.top_p < 1:
            logprobs = apply_top_p(logprobs, self.top_p)
        if self.min_p != 0:
            least = min(self.min_tokens_to_keep, logprobs.shape[-1])
            logprobs = apply_min_p(logprobs, self.min_p, least)
        return logprobs

    def exclude_top(self, row: mx.array) -> mx.array:
        special = list(self.xtc_special_tokens)
        return apply_xtc(row, self.xtc_probability, self.xtc_threshold, special)

    def draft_probs(self, scores: mx.array, excludable: mx.array | None = None) -> mx.array:
        """The probabilities [.., K] to draft with, given scores [.., K] of the K candidates.

        The user's truncation without the coin of XTC: any distribution is lossless, one close to
        the target's is accepted more often. excludable [.., K]: the candidates that XTC may
        exclude, where its coin is known.
        """
        kept = self.truncate(scores - mx.logsumexp(scores, axis=-1, keepdims=True))
        if excludable is not None:
            probs = mx.softmax(kept, axis=-1)
            high = mx.where(probs > self.xtc_threshold, probs, mx.inf)
            top = probs > high.min(axis=-1, keepdims=True)
            kept = mx.where(excludable & top, -mx.inf, kept)
        if 0 < self.top_k < kept.shape[-1]:
            kept = apply_top_k(kept, self.top_k)
        return mx.softmax(kept * (1.0 / self.temp), axis=-1)
