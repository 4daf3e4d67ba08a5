"""The batch that mlx_lm.server drives, in this process, and requests for it."""

from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.server.call import Call, Calls, Reply
from dspine_mlx.server.decoding import TextSettings
from dspine_mlx.server.drafting_batch import DraftingBatch
from dspine_mlx.server.job import Job
from dspine_mlx.server.options import Options
from dspine_mlx.verify_length.schedule import prepare
from tests.support.texts import scripted_texts
from tests.support.tiny import Step, plain_steps

NEVER = 1 << 30


@dataclass
class Request:
    """A request: what it asks for, when it comes, and when its client goes away."""

    prompt: list[int]
    budget: int = 12
    sampler: Any = greedy_sampler
    processors: list[Any] = field(default_factory=list)
    seed: int | None = None
    verify_length: int | str = "auto"
    comes: int = 0  # calls of `next` before it
    goes: int = NEVER

    def job(self, uid: int) -> Job:
        call = Call()
        call.drafted = self.verify_length != 0
        settings = TextSettings(
            self.sampler, self.processors, frozenset(), None, self.verify_length, self.seed
        )
        return Job(
            uid,
            Reply(Queue(), call, Calls()),
            mx.array(self.prompt, mx.uint32),
            list(self.prompt),
            self.budget,
            None,
            {},
            settings,
            Endless(),
        )

    def plain(self, model: nn.Module, tokenizer: TokenizerWrapper) -> list[Step]:
        if self.seed is not None:
            mx.random.seed(self.seed)
        return plain_steps(
            model,
            tokenizer,
            self.prompt,
            max_tokens=self.budget,
            sampler=self.sampler,
            logits_processors=self.processors,
        )


class Endless:
    """Replies that end at their last token only."""

    def advance(self, token: int) -> bool:
        return False


@dataclass
class Run:
    """A batch and what came of its requests, by their place."""

    batch: DraftingBatch
    steps: dict[int, list[Step]]
    jobs: dict[int, Job]
    ended: dict[int, tuple[list[int], list[Any]]]  # tokens, and the caches that hold them
    kept: list[tuple[list[int], list[Any]]]


def new_batch(
    drafter: Drafter, verify_length: int | str, kept: Any, lookup: bool = True, **options: Any
) -> Any:
    sizes = {"completion_batch_size": 4, "prefill_batch_size": 2, "prefill_step_size": 16} | options
    settings = Options(verify_length=verify_length, lookup=lookup)
    return DraftingBatch(
        drafter, settings, lambda uid, asked: asked[0].job(uid),
        lambda tokens, caches: kept.append((tokens, caches)), stream=generation_stream, **sizes,
    )  # fmt: skip


def run(drafter: Drafter, asked: list[Request], verify_length: int | str, **options: Any) -> Run:
    """Serve requests as they come, until nobody is left."""
    kept: list[Any] = []
    batch = new_batch(drafter, verify_length, kept, **options)
    result, places, turn = Run(batch, {}, {}, {}, kept), {}, 0
    while turn <= max(one.comes for one in asked) or batch.jobs:
        for place, one in enumerate(asked):
            if one.comes == turn:
                (uid,) = batch.insert_segments(asked=[one])
                places[uid], result.steps[place] = place, []
                result.jobs[place] = batch.jobs[uid]
        batch.remove([uid for uid, place in places.items() if asked[place].goes == turn])
        _, responses = batch.next()
        for r in responses:
            result.steps[places[r.uid]].append((r.token, r.logprobs))
            if r.finish_reason is not None:
                result.ended[places[r.uid]] = r.all_tokens, r.prompt_cache
        turn += 1
        assert turn < 5000
        assert batch.prompt_cache_nbytes > 0 or not any(job.done for job in batch.jobs.values())
    batch.close()
    assert not batch.batch.texts
    assert batch.prompt_cache_nbytes == 0
    return result


def known(
    model: nn.Module, asked: list[Request], plain: list[list[Step]], script: str = "now and then"
) -> Any:
    """A drafter that knows the plain texts."""
    texts = [
        one.prompt + [token for token, _ in steps] for one, steps in zip(asked, plain, strict=True)
    ]
    drafter = scripted_texts(model, texts, script)
    prepare(drafter, profile=False)
    return drafter
