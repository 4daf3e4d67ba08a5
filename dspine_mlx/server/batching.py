"""Which requests share a batch: a drafting one, or one of mlx_lm's own."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mlx_lm import server as host

from dspine_mlx.batch.generation import why_alone
from dspine_mlx.server.call import Calls
from dspine_mlx.server.decoding import Arguments
from dspine_mlx.server.drafting_batch import DraftingBatch
from dspine_mlx.server.job import Job, job_of
from dspine_mlx.server.options import Options
from dspine_mlx.server.prompt_cache import PromptCache
from dspine_mlx.server.provider import DEFAULT, Provider

STOCK: Any = host.BatchGenerator  # before that name is rebound


class Batching:
    """Batches of one server. Only its generation thread uses them."""

    arriving: Arguments  # of the request that was tokenised last

    def __init__(
        self, provider: Provider, prompt_cache: PromptCache, options: Options, calls: Calls
    ):
        self.provider, self.prompt_cache = provider, prompt_cache
        self.options, self.calls = options, calls
        self.batch: Callable[[], DraftingBatch | None] = lambda: None  # a weak reference

    def choose_path(
        self, args: Arguments, images: bool, batchable: Callable[[Arguments], bool]
    ) -> None:
        """Choose the drafter whose batch a request joins; None is mlx_lm's own batch. A request
        that can't be batched is decoded in turn, and one with images without drafting."""
        call = args.call
        wanted = self.provider.draft_for(args.model)
        call.drafted = wanted is not None and call.verify_length != 0 and not images
        if images:  # whatever drafter is loaded stays
            call.path = "plain"
            args.model = replace(args.model, draft=wanted)
            return
        for draft in self.batches_for(args, wanted):
            args.model = replace(args.model, draft=draft)
            if batchable(args):
                if draft is None:
                    call.path, call.drafted = "batched", False
                return  # a drafting batch says how its texts are decoded
        call.path = "speculative" if call.drafted else "plain"
        args.model = replace(args.model, draft=wanted if call.drafted else None)

    def batches_for(self, args: Arguments, wanted: str | None) -> list[str | None]:
        """Drafters of batches that a request may join, the best first.

        A batch at work takes all requests for its model, so that none has to wait: whoever drafts,
        a text is the target's own, and one without a drafter is never drafted for. Otherwise
        mlx_lm's batches serve those without a drafter, and several requests of a pair that drafts
        for one text at a time.
        """
        provider, own = self.provider, args.call.verify_length
        if self.drafting:
            return [wanted, provider.model_key[2]]
        if self.plain_batch:
            return [None, wanted]
        if wanted is None or own == self.options.verify_length == 0:
            return [None, wanted or provider.draft_for(replace(args.model, draft=DEFAULT))]
        loaded = provider.loaded_drafter(replace(args.model, draft=wanted)) is not None
        busy = loaded and len(self.calls) > 1
        return [wanted, None] if busy or not args.call.drafted else [wanted]

    @property
    def drafting(self) -> bool:
        """Whether requests are at work that share a drafter."""
        batch = self.batch()
        return batch is not None and bool(batch.jobs)

    @property
    def plain_batch(self) -> bool:
        """Whether a batch of mlx_lm's own is at work."""
        running = [args for *_, args in self.calls.in_progress()]
        return any(args.call.path == "batched" and args.model.draft is None for args in running)

    def possible(self, args: Arguments) -> bool:
        """Whether a request with a drafter can be decoded with others."""
        drafter = self.provider.loaded_drafter(args.model)
        together = drafter is not None and why_alone(drafter) is None
        return together and self.provider.cli_args.kv_bits is None

    def batch_generator(self, model: Any, **options: Any) -> Any:
        """Stand-in for mlx_lm's BatchGenerator, for the model that was loaded last."""
        drafter = self.provider.draft_model
        if drafter is None or self.provider.part is not None:  # a group drafts for one text
            return STOCK(model, **options)
        keep = partial(self.prompt_cache.insert_cache, self.provider.model_key)
        batch = DraftingBatch(drafter, self.options, self.new_job, keep, **options)
        self.batch = weakref.ref(batch)
        return batch

    def new_job(self, uid: int, **request: list[Any]) -> Job:
        """The request that has just been tokenised."""
        return job_of(uid, self.arriving, self.provider, self.prompt_cache, request)
