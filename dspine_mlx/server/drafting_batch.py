"""What mlx_lm.server drives in place of its BatchGenerator: requests that are drafted for together.

A text that nobody shares the machine with is decoded as `stream_generate` does it. When a second
one comes, both go on as a batch (`dspine_mlx.batch`), in which texts join and leave between rounds.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch, wired_limit

from dspine_mlx.batch.batch import Batch
from dspine_mlx.batch.plain import decode_plainly
from dspine_mlx.batch.policies import batch_policy
from dspine_mlx.batch.policy import BatchPolicy, FixedLength
from dspine_mlx.batch.speculate import speculate
from dspine_mlx.batch.text import BatchText
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.round.decode import warn_of_misfit
from dspine_mlx.round.text import Token
from dspine_mlx.server.job import Alone, Job
from dspine_mlx.server.options import Options
from dspine_mlx.server.pace import Pace

QUIET = 16  # steps of a batch with one text, after which that goes on by itself
CLEAR = 256  # steps between two times that freed memory is given back

Progress: TypeAlias = PromptProcessingBatch.Response
Response: TypeAlias = GenerationBatch.Response
Keep = Callable[[list[int], list[Any]], None]  # tokens and their caches, for the prompt cache


class DraftingBatch:
    """mlx-lm's BatchGenerator, as far as its server uses it: insert, next, remove, close.

    `next` hands out at most one token per text; a round's further tokens follow in the next calls,
    which run nothing on the device.
    """

    def __init__(
        self,
        drafter: Drafter,
        options: Options,
        make_job: Callable[..., Job],
        keep: Keep,
        *,
        completion_batch_size: int,
        prefill_batch_size: int,
        prefill_step_size: int,
        stream: mx.Stream,
    ):
        """make_job: makes a job of the lists that mlx_lm.server inserts, of one request. keep: puts
        the caches of a text that was given up into the prompt cache."""
        self.drafter, self.options, self.stream = drafter, options, stream
        self.make_job, self.keep = make_job, keep
        self.most, self.most_prompts = completion_batch_size, prefill_batch_size
        self.step_size, self.pace = prefill_step_size, Pace()
        self.uids, self.steps = itertools.count(), itertools.count(1)
        self.jobs: dict[int, Job] = {}  # all of them, by uid
        self.waiting: deque[Job] = deque()
        self.prefilling: deque[Job] = deque()
        self.prefilled: list[Job] = []  # that start with the next step
        self.alone: Alone | None = None
        self.given_up: list[Progress] = []  # how mlx_lm.server hears of jobs that have failed
        self.finished: dict[Job, list[Any]] = {}  # caches of texts that are over
        self.quiet = 0  # steps since the batch had several texts
        self.round_seconds: float | None = None  # of the newest step of several texts
        self.wired = ExitStack()
        self.wired.enter_context(wired_limit([drafter.target.model, drafter.network], [stream]))
        with mx.stream(stream):
            self.batch = Batch(drafter)
            self.policy: BatchPolicy = batch_policy(options.verify_length, drafter)

    # ---- what mlx_lm.server calls

    def insert_segments(self, **request: list[Any]) -> list[int]:
        job = self.make_job(next(self.uids), **request)
        self.jobs[job.uid] = job
        self.waiting.append(job)
        return [job.uid]

    def next(self) -> tuple[list[Progress], list[Response]]:
        """The next token of each text, or a step and a chunk of a prompt."""
        with mx.stream(self.stream):
            progress = []
            if not any(job.ready for job in self.jobs.values()):
                self.give_up()
                self.admit()
                self.part()
                self.step()
                progress = self.prefill()
                if next(self.steps) % CLEAR == 0:
                    mx.clear_cache()
            responses = [self.response(job) for job in list(self.jobs.values()) if job.ready]
            progress, self.given_up = [*progress, *self.given_up], []
        return progress, responses

    def remove(self, uids: list[int]) -> None:
        """Give jobs up, whose clients have gone. What their caches hold may serve others."""
        with mx.stream(self.stream):
            for job in [self.jobs[uid] for uid in uids if uid in self.jobs]:
                if self.decodes(job):
                    self.keep(*self.end(job))
                self.forget(job)

    def extract_cache(self, uids: list[int]) -> dict[int, Any]:
        """None: checkpoints of prompts go to the prompt cache by themselves."""
        return {}

    @property
    def prompt_cache_nbytes(self) -> int:
        own = [job.text.prompt_cache for job in self.jobs.values() if job.text is not None]
        drafters = [group.context.cache for group in self.batch.groups]
        target = sum(group.target.nbytes for group in self.batch.groups)
        held = [*own, *drafters, *self.finished.values()]
        return target + sum(c.nbytes for caches in held for c in caches)

    def close(self) -> None:
        self.wired.close()

    def __del__(self) -> None:  # of a batch that has failed
        self.close()

    # ---- from prompt to text

    @property
    def room(self) -> int:
        """Texts that may still start."""
        return self.most - (len(self.jobs) - len(self.waiting))

    def give_up(self) -> None:
        """Let go of clients that went away before their text started."""
        for job in [*self.waiting, *self.prefilling, *self.prefilled]:
            if job.call.failure is not None:
                self.fail(job, job.call.failure)

    def prefill(self) -> list[Progress]:
        """A chunk of one prompt. Prompts take turns, so that a long one does not hold up others."""
        started: list[Job] = []
        while self.waiting and self.room > 0 and len(self.prefilling) < self.most_prompts:
            started.append(self.waiting.popleft())
            self.prefilling.append(started[-1])
        progress = [Progress(job.uid, job.progress, False, False) for job in started]
        if not self.prefilling:
            return progress
        job, clock = self.prefilling.popleft(), time.perf_counter()
        try:
            if job.text is None:
                job.start(self.drafter)
            size = job.prefill(self.pace.tokens(self.plain_seconds, self.step_size))
        except Exception as error:  # noqa: BLE001  of any type, but this job's only
            self.fail(job, error)
            return progress
        if size:
            self.pace.learn(size, time.perf_counter() - clock)
        (self.prefilled if job.prefilled else self.prefilling).append(job)
        return [*progress, Progress(job.uid, job.progress, False, False)]

    @property
    def plain_seconds(self) -> float | None:
        """Of a plain step of the running texts; None if there are none."""
        if self.alone is not None:
            schedule = self.drafter.schedule
            return None if schedule is None else schedule.costs.plain(self.alone.text.position)
        if not self.batch.texts:
            return None
        known = self.policy.plain_seconds(len(self.batch.texts), self.batch.depth)
        return self.round_seconds if known is None else known

    def admit(self) -> None:
        """Start texts whose prompts are done: one by itself, several together."""
        if not self.prefilled or (self.alone is not None and not self.alone.at_block_end):
            return
        starting, self.prefilled = self.prefilled, []
        idle = self.alone is None and not self.batch.texts
        if idle and len(starting) == 1 and starting[0].call.drafted:
            self.guard(starting[0], self.start_alone)
            return
        if self.alone is not None:
            starting.insert(0, self.alone.job)
        for job in starting:
            self.guard(job, self.join)

    def part(self) -> None:
        """Let a text that the others have left for a while go on by itself."""
        if self.quiet < QUIET or len(self.jobs) != 1:
            return
        job = next(iter(self.jobs.values()))
        if job.shared in self.batch.texts and job.call.drafted:
            caches = self.batch.leave(job.shared, with_caches=True, with_newest=False)
            assert caches is not None
            job.by_itself(caches)
            self.start_alone(job)

    def start_alone(self, job: Job) -> None:
        if job.call.path != "batched":
            job.call.path = "speculative"
        self.alone = Alone(job, self.drafter, self.options.lookup)

    def join(self, job: Job) -> None:
        job.call.path = "batched"
        if self.alone is not None and self.alone.job is job:
            text, self.alone = self.alone.join(self.options.lookup), None
        else:
            text = job.among_others(self.options.lookup)
        self.batch.join(text)
        self.policy.join(text, len(self.batch.texts), self.batch.depth)

    def guard(self, job: Job, work: Callable[[Job], None]) -> None:
        """Do a job's own work; what it raises ends this job only."""
        try:
            work(job)
        except Exception as error:  # noqa: BLE001  of any type, but this job's only
            self.fail(job, error)

    # ---- steps

    def step(self) -> None:
        """A token of the text that is alone, or a block for each text of the batch."""
        if self.alone is not None:
            self.guard(self.alone.job, lambda job: self.step_alone())
        elif self.batch.texts:
            self.step_together()

    def step_alone(self) -> None:
        assert self.alone is not None
        self.alone.step()

    def step_together(self) -> None:
        """An error here is nobody's own, and ends the batch."""
        texts, clock = list(self.batch.texts), time.perf_counter()
        self.quiet = self.quiet + 1 if len(texts) == 1 else 0
        policy = self.policy_for(texts)
        last = all(text.left < 2 for text in texts)  # nothing is drafted for a last token
        plainly = policy.plainly(texts, self.batch.depth) or last
        blocks = (decode_plainly if plainly else speculate)(self.batch, policy)
        known = {} if plainly else own_logprobs(blocks)  # a plain step's are on their way
        self.round_seconds = time.perf_counter() - clock
        owners = {job.shared: job for job in self.jobs.values() if job.shared is not None}
        for text, block in zip(texts, blocks, strict=True):
            job = owners[text]
            if text.failure is not None:
                self.fail(job, text.failure)
                continue
            job.call.shared_steps += 1
            job.call.shared_texts += len(texts)
            job.call.timed()
            if known and not job.whole_rows:
                block = [(token, known[id(row)], drafted) for token, row, drafted in block]
            job.ready.extend(block)
            if text.over:
                self.finished[job] = self.leave(job)

    def policy_for(self, texts: list[BatchText]) -> BatchPolicy:
        """The server's, unless every request has a length of its own."""
        longest = max(text.most for text in texts)
        return self.policy if longest == math.inf else FixedLength(int(longest))

    def response(self, job: Job) -> Response:
        """Hand out the next token of a text."""
        (token, logprobs, _), reason = job.hand_out()
        if reason is None:
            return Response(job.uid, token, logprobs, None, None, None)
        tokens, caches = self.end(job)
        self.forget(job)
        return Response(job.uid, token, logprobs, reason, caches, tokens)

    # ---- ends

    def decodes(self, job: Job) -> bool:
        """Whether its text has started."""
        alone = self.alone is not None and self.alone.job is job
        return alone or job.shared in self.batch.texts or job in self.finished

    def end(self, job: Job) -> tuple[list[int], list[Any]]:
        """End a text: its tokens, and caches that hold them."""
        if self.alone is not None and self.alone.job is job:
            alone, self.alone = self.alone, None
            return job.tokens, alone.finish()
        if job not in self.finished:
            self.finished[job] = self.leave(job)
        return job.all_tokens, self.finished.pop(job)

    def leave(self, job: Job) -> list[Any]:
        """Take a text out of the batch; its caches hold all of its last block."""
        assert job.shared is not None
        warn_of_misfit(job.shared.text)
        job.call.statistics.verdict = self.policy.verdict(job.shared)
        caches = self.batch.leave(job.shared, with_caches=True)
        assert caches is not None
        return caches

    def forget(self, job: Job) -> None:
        self.jobs.pop(job.uid, None)
        for jobs in (self.waiting, self.prefilling, self.prefilled):
            if job in jobs:
                jobs.remove(job)
        self.finished.pop(job, None)
        if self.alone is not None and self.alone.job is job:
            self.alone.stop()
            self.alone = None
        if job.shared in self.batch.texts:
            self.batch.leave(job.shared)

    def fail(self, job: Job, error: Exception) -> None:
        """Give a job up; its client gets the error."""
        self.forget(job)
        job.reply.put(error)
        if job.call.context is not None:
            job.call.context.stop()
        self.given_up.append(Progress(job.uid, job.progress, False, False))


def own_logprobs(blocks: list[list[Token]]) -> dict[int, Any]:
    """Each token's own logprob, as a row that holds nothing else, by the id of its whole row. They
    are read together: mlx_lm.server would wait for the device once per token."""
    tokens = [token for block in blocks for token in block]
    values = np.array(mx.stack([row[token] for token, row, _ in tokens]).astype(mx.float32))
    pairs = zip(tokens, values, strict=True)
    return {id(row): {token: value} for (token, row, _), value in pairs}
