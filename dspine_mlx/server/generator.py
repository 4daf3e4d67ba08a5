"""mlx_lm.server's ResponseGenerator: drafting when idle, mlx_lm's batches under load."""

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from queue import Empty, Queue
from typing import Any

import mlx.core as mx
from mlx_lm import server as host
from mlx_lm.generate import GenerationResponse
from mlx_lm.generate import stream_generate as plain_generate

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.generate import stream_generate as draft_generate
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.server.call import (
    CLIENT_GONE,
    Call,
    Calls,
    Failed,
    Reasoning,
    Reply,
    UnknownModel,
    serving,
)
from dspine_mlx.server.grammar import Constraint, constraint
from dspine_mlx.server.metrics import Metrics
from dspine_mlx.server.options import Options
from dspine_mlx.server.prompt_cache import PromptCache
from dspine_mlx.server.provider import Provider

POLL = 0.1  # seconds between two looks at a waiting client's connection


@dataclass
class Arguments(host.GenerationArguments):
    """A request's arguments, and the call they belong to."""

    call: Call


class ResponseGenerator(host.ResponseGenerator):
    def __init__(self, provider: Provider, prompt_cache: PromptCache, options: Options):
        self.options = options
        self.calls = Calls()
        self.handlers: set[Call] = set()  # calls whose HTTP threads still have to answer
        self.metrics = Metrics()
        self.load_failure: str | None = None
        super().__init__(provider, prompt_cache)

    # ---- in the HTTP threads

    def generate(
        self,
        request: host.CompletionRequest,
        generation_args: host.GenerationArguments,
        progress_callback: Callable[[int, int], None] | None = None,
    ) -> tuple[host.GenerationContext, Iterator[host.Response]]:
        call = serving.get()
        self.handlers.add(call)
        self.calls.add(call)
        args = Arguments(**vars(generation_args), call=call)
        try:
            context, responses = super().generate(request, args, progress_callback)
        except Exception as error:  # whatever the generation thread put on the queue
            raise call.fail(failed(error)) from error
        return context, answered(responses, call)

    def _await_response(self, response_queue: Queue) -> Any:
        if self._is_distributed:  # one rank can't give up alone
            return super()._await_response(response_queue)
        call = serving.get()
        while True:
            if call.disconnected():
                raise call.fail(Failed(CLIENT_GONE, "the client closed its end before the reply"))
            try:
                return response_queue.get(timeout=POLL)
            except Empty:
                if not self.generation_available():
                    raise Failed(503, "the server is stopping") from None

    def release(self, call: Call) -> None:
        """The HTTP thread is done with a call, whether or not it got its reply."""
        self.calls.remove(call)
        self.handlers.discard(call)
        self.metrics.finish(call)

    def stop_and_join(self) -> None:
        if not self._is_distributed:
            self.calls.close(Failed(503, "the server is stopping"))
        super().stop_and_join()

    # ---- in the generation thread

    def _generate(self) -> None:
        try:
            self.model_provider.load_default()
        except (ValueError, OSError, RuntimeError) as error:
            self.load_failure = " ".join(str(error).split())
            return
        super()._generate()
        mx.clear_streams()  # left to the thread's end, they race with the end of the process

    def _next_request(self, timeout: float | None = None) -> tuple | None:
        item = super()._next_request(timeout)
        if item is None:
            return None
        queue, request, args = item
        reply = Reply(queue, args.call, self.calls)
        if args.call.failure is not None:  # its client has gone
            reply.put(args.call.failure)
            return None
        self.choose_path(args)
        return reply, request, args

    def choose_path(self, args: Arguments) -> None:
        """Keep the drafter of a request that mlx_lm would serve alone, drop it under load."""
        draft = self.model_provider.draft_for(args.model)
        if args.call.verify_length == 0:
            draft = None
        args.model = replace(args.model, draft=None)
        batchable = self._is_batchable(args)
        if draft is not None and not (batchable and len(self.calls) > self.options.speculate_up_to):
            args.model = replace(args.model, draft=draft)
            args.call.path = "speculative"
        else:
            args.call.path = "batched" if batchable else "plain"

    def _is_batchable(self, args: Arguments) -> bool:
        alone = args.model.draft is not None or args.call.grammar is not None
        return not alone and super()._is_batchable(args)

    def _tokenize(self, tokenizer: Any, request: host.CompletionRequest, args: Arguments) -> Any:
        try:
            prompt, *others = super()._tokenize(tokenizer, request, args)
        except Exception as error:  # chat templates raise what they like; it is the request's doing
            raise InputError(f"this request can't be made a prompt: {error}") from error
        check_prompt(prompt, args, self.model_provider)
        args.call.tools = bool(request.tools)
        args.call.reasoning = reasoning(
            "reasoning" in others, bool((args.chat_template_kwargs or {}).get("enable_thinking"))
        )
        return prompt, *others

    def _serve_single(self, request: tuple, stream: mx.Stream) -> None:
        self.current: Arguments = request[2]
        super()._serve_single(request, stream)

    def stream_generate(
        self,
        model: Any,
        tokenizer: Any,
        prompt: list[int],
        max_tokens: int = 256,
        draft_model: Drafter | None = None,
        **options: Any,
    ) -> Generator[GenerationResponse, None, None]:
        """What `_serve_single` calls for mlx_lm's stream_generate."""
        args, call = self.current, self.current.call
        options |= {"max_tokens": max_tokens, "prompt_progress_callback": checked(call, options)}
        grammar = constraint(call, tokenizer)
        if grammar is not None:
            options["logits_processors"] = [*options["logits_processors"], grammar]
        if draft_model is not None and options.get("input_embeddings") is None:
            options = drafting(options, args, tokenizer, grammar)
            options["prompt_checkpoints"] = self.prompt_cache.checkpoints(
                self.model_provider.model_key, call.prompt, prompt, tokenizer.eos_token_ids
            )
            tokens = draft_generate(model, tokenizer, prompt, draft_model, **options)
        else:  # images: their rows are embeddings, which a drafter's prefill doesn't take
            del options["prompt_cache"][self.model_provider.target_caches :]
            tokens = plain_generate(model, tokenizer, prompt, **options)
        with closing(tokens):
            yield from observed(tokens, call)


def reasoning(inside: bool, asked: bool) -> Reasoning:
    """A reply may open a reasoning block only where the client asked for one: a model that has the
    tokens but was not made to reason would take them for a way around the grammar."""
    if inside:
        return "inside"
    return "possible" if asked else "over"


def failed(error: Exception) -> Failed:
    """What a client is told of an error."""
    if isinstance(error, Failed):
        return error
    if isinstance(error, InputError):
        return Failed(404 if isinstance(error, UnknownModel) else 400, str(error))
    logging.error("a request failed", exc_info=error)
    return Failed(500, f"{type(error).__name__}: {error}")


def answered(responses: Iterator[host.Response], call: Call) -> Iterator[host.Response]:
    """The responses; every error but one of the client's own connection becomes a `Failed`."""
    try:
        yield from responses
        call.check()  # a call that was given up ends early and quietly
    except OSError:
        raise
    except Exception as error:  # whatever the generation thread put on the queue
        raise call.fail(failed(error)) from error


def check_prompt(prompt: list[int], args: Arguments, provider: Provider) -> None:
    if len(prompt) == 0:
        raise InputError("the prompt is empty; give at least one token")
    limit, vocabulary = provider.context_length, provider.vocab_size
    if limit is not None and len(prompt) > limit:
        raise InputError(f"the prompt has {len(prompt)} tokens; the model's context has {limit}")
    if limit is not None and args.max_tokens > limit:
        raise InputError(f"max_tokens is {args.max_tokens}; the model's context has {limit} tokens")
    biased = args.logits.logit_bias or {}
    if vocabulary is not None and not all(0 <= token < vocabulary for token in biased):
        raise InputError(f"logit_bias names a token outside the model's {vocabulary}")
    if vocabulary is not None and args.sampling.top_k > vocabulary:
        raise InputError(f"top_k is {args.sampling.top_k}; the model has {vocabulary} tokens")


def checked(call: Call, options: dict[str, Any]) -> Callable[[int, int], None]:
    """The prefill's progress callback, which also ends the prefill of a call that was given up."""
    progress = options["prompt_progress_callback"]

    def report(done: int, total: int) -> None:
        call.check()
        progress(done, total)
        if done < total:
            call.round_started = time.perf_counter()

    return report


def drafting(
    options: dict[str, Any], args: Arguments, tokenizer: Any, grammar: Constraint | None
) -> dict[str, Any]:
    """The options of mlx_lm's stream_generate as dspine_mlx.stream_generate takes them.

    With a seed the draws are those of seeded plain decoding, and drafts foresee them. Otherwise
    drafts are sampled and verified by the ratio test, but for a grammar, which cuts them.
    """
    unknown = ("num_draft_tokens", "input_embeddings")
    options = {name: value for name, value in options.items() if name not in unknown}
    options["verify_length"] = args.call.verify_length
    seeded = args.seed is not None
    if args.sampling.temperature > 0 and (seeded or grammar is None):
        special = (*tokenizer.encode("\n"), *tokenizer.eos_token_ids)
        options["sampler"] = Sampler(
            args.sampling.temperature,
            top_p=args.sampling.top_p,
            top_k=args.sampling.top_k,
            min_p=args.sampling.min_p,
            xtc_probability=args.sampling.xtc_probability,
            xtc_threshold=args.sampling.xtc_threshold,
            xtc_special_tokens=special,
            seeded=seeded,
        )
    if grammar is not None:
        options["draft_filter"] = grammar.permitted
    return options


def observed(tokens: Iterator[GenerationResponse], call: Call) -> Iterator[GenerationResponse]:
    """The tokens, until the call is given up; times its rounds and keeps its statistics.

    An end after a token leaves the caches at the tokens so far, which then go to the prompt cache.
    """
    rounds = 0
    for response in tokens:
        if call.path == "speculative":
            call.statistics = response.statistics
            now = time.perf_counter()
            if response.statistics.rounds > rounds:
                call.round_seconds.append(now - call.round_started)
                rounds = response.statistics.rounds
            call.round_started = now
        yield response
        if call.failure is not None:
            return
