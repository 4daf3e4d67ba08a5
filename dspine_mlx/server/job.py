"""A request of a drafting batch, and a text that is decoded alone."""

import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from dspine_mlx.batch.text import BatchText
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.generate import make_caches
from dspine_mlx.round.decode import decode_text, look_up, warn_of_misfit
from dspine_mlx.round.lookup import Lookup
from dspine_mlx.round.text import Checkpoints, Text, Token
from dspine_mlx.server.call import Call, Reply
from dspine_mlx.server.decoding import Arguments, TextSettings, random_state, text_settings
from dspine_mlx.server.prompt_cache import PromptCache
from dspine_mlx.server.provider import Provider
from dspine_mlx.server.stops import TokenMatcher
from dspine_mlx.verify_length.schedule import policy_for


@dataclass(eq=False)
class Job:
    """A request on its way: first its prompt, then its text.

    tokens: of the prompt and of the reply, as far as it was handed out.
    ready: tokens of the text that are next to be handed out.
    """

    uid: int
    reply: Reply
    prompt: mx.array  # [n], what no cache holds
    tokens: list[int]
    budget: int  # tokens of the reply, at most
    caches: list[Any] | None  # that were found for the tokens before the prompt
    checkpoints: Checkpoints
    settings: TextSettings
    stops: TokenMatcher
    whole_rows: bool = True  # whether more than each token's own logprob is asked for
    done: int = 0  # tokens of the prompt that are in the caches
    ready: deque[Token] = field(default_factory=deque)
    text: Text | None = None
    shared: BatchText | None = None  # its text, once it is among others

    def __post_init__(self) -> None:
        self.left = self.budget  # tokens that may still be handed out

    @property
    def call(self) -> Call:
        return self.reply.call

    def start(self, drafter: Drafter) -> None:
        """Make its text, with caches for the prompt."""
        self.text = Text(
            drafter,
            make_caches(drafter.target.model, drafter, self.caches, None),
            self.settings.sampler,
            self.settings.processors,
            stops=self.settings.stops,
            draft_filter=self.settings.draft_filter,
        )
        self.call.statistics = self.text.statistics

    def prefill(self, most: int) -> int:
        """Feed a chunk of at most so many tokens, up to a checkpoint; returns its size. Once the
        prompt is in the caches all but its last token, the text can start."""
        assert self.text is not None
        self.call.check()
        last = self.prompt.size - 1
        stops = [n for n in self.checkpoints if n > self.done]
        end = min([self.done + most, last, *stops])
        at = {end - self.done: self.checkpoints[end]} if end in self.checkpoints else {}
        for _ in self.text.prefill(self.prompt[self.done : end + 1], most, at):
            pass
        size, self.done = end - self.done, end
        if self.prefilled:  # what processors see must not depend on what was cached
            self.text.history = mx.array(self.tokens[:-1], mx.uint32)
        self.call.round_started = time.perf_counter()
        return size

    @property
    def prefilled(self) -> bool:
        return self.done == self.prompt.size - 1

    @property
    def progress(self) -> tuple[int, int]:
        return self.done, self.prompt.size

    def hand_out(self) -> tuple[Token, str | None]:
        """The next token, and the reply's finish reason if it is the last one."""
        token = self.ready.popleft()
        self.tokens.append(token[0])
        self.left -= 1
        if self.stops.advance(token[0]):
            return token, "stop"
        return token, "length" if self.left == 0 else None

    @property
    def random_state(self) -> mx.array | None:
        """Of a seeded text: the draws that it has made are its seed's first ones."""
        if self.settings.seed is None:
            return None
        return random_state(self.settings.sampler, self.settings.seed, self.budget - self.left)

    def among_others(self, lookup: bool) -> BatchText:
        """Its text, for a batch; lookup: whether copies may be offered."""
        assert self.text is not None
        if lookup and self.text.lookup is None:
            self.text.lookup = Lookup(self.settings.stops, self.tokens)
        most = self.settings.verify_length
        self.shared = BatchText(self.text, self.left, self.random_state)
        if isinstance(most, int):
            self.shared.most = most
        return self.shared

    def by_itself(self, caches: list[Any]) -> None:
        """Take its text back from a batch, in caches that hold all but the newest token."""
        assert self.text is not None
        others, self.shared = self.text, None
        self.text = replace(others, prompt_cache=caches)
        self.text.history, self.text.pending = others.history, others.pending

    @property
    def all_tokens(self) -> list[int]:
        """Those that the caches of its text hold."""
        return [*self.tokens, *(token for token, *_ in self.ready)]


def job_of(
    uid: int,
    args: Arguments,
    provider: Provider,
    prompt_cache: PromptCache,
    request: dict[str, list[Any]],
) -> Job:
    """A job of what mlx_lm.server inserts into its BatchGenerator; the lists have one entry."""
    tokenizer = provider.tokenizer
    prompt = [token for segment in request["segments"][0] for token in segment]
    tokens, stops = [*request["all_tokens"][0], *prompt], tokenizer.eos_token_ids
    sampler, processors = request["samplers"][0], request["logits_processors"][0]
    assert args.call.reply is not None
    return Job(
        uid,
        args.call.reply,
        mx.array(prompt, mx.uint32),
        tokens,
        request["max_tokens"][0],
        request["caches"][0],
        prompt_cache.checkpoints(provider.model_key, tokens, prompt, stops),
        text_settings(args, tokenizer, sampler, processors),
        request["stop_sequences"][0].matcher(),
        args.top_logprobs > 0,
    )


class Alone:
    """A text that is decoded as `stream_generate` does it, one token after another."""

    def __init__(self, job: Job, drafter: Drafter, lookup: bool):
        assert job.text is not None
        self.job, self.text = job, job.text
        self.others: mx.array | None = None  # `mx.random`'s state outside this text
        self.policy = policy_for(job.settings.verify_length, drafter, self.text.sampler)
        self.policy.start_text(self.text.statistics, self.text.sampler, self.text.position)
        if lookup and self.text.lookup is None:
            self.text.lookup = Lookup(self.text.stops, job.tokens)
        look_up(self.text, self.policy)
        if job.settings.seed is not None:
            self.others = mx.array(mx.random.state[0])
            mx.random.state[0][:] = job.random_state
        self.stream: Generator[Token, None, None] = decode_text(self.text, self.policy, job.left)
        self.newest: Token | None = None

    def step(self) -> None:
        """The next token. A block's later tokens cost nothing."""
        self.newest = next(self.stream)
        self.job.ready.append(self.newest)
        self.job.call.timed()

    @property
    def at_block_end(self) -> bool:
        """Whether its newest token is the target's own, so that it can be the anchor of a round
        among others."""
        return self.newest is None or not self.newest[2]

    def join(self, lookup: bool) -> BatchText:
        """The text for a batch, which has to be at a block's end."""
        self.stop()
        text = self.text
        if self.newest is not None and text.pending is None:  # plain decoding fed it ahead
            text.rows, text.pending = 0, mx.array([self.newest[0]], mx.uint32)
        text.roll_back()
        text.context.catch_up()
        return self.job.among_others(lookup)

    def finish(self) -> list[Any]:
        """Its caches, which hold all of its text."""
        self.stop()
        self.text.settle()
        warn_of_misfit(self.text)
        self.text.statistics.verdict = self.policy.verdict(self.text.position)
        return self.text.prompt_cache

    def stop(self) -> None:
        self.stream.close()
        if self.others is not None:
            mx.random.state[0][:] = self.others
