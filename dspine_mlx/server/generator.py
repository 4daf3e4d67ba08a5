"""mlx_lm.server's ResponseGenerator, whose requests are drafted for: alone or together."""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from queue import Empty, Queue
from typing import Any

import mlx.core as mx
from mlx_lm import server as host
from mlx_lm.generate import GenerationResponse
from mlx_lm.generate import stream_generate as plain_generate

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError, LostRank
from dspine_mlx.generate import stream_generate as draft_generate
from dspine_mlx.group.target import PartOfTarget
from dspine_mlx.load import same_random_state
from dspine_mlx.server.batching import Batching
from dspine_mlx.server.call import Call, Calls, Reply, answered, serving
from dspine_mlx.server.decoding import (
    Arguments,
    check_prompt,
    checked,
    drafting,
    observed,
    own_sampler,
    random_state,
    reasoning,
    try_sampling,
)
from dspine_mlx.server.failure import CLIENT_GONE, Failed, failed
from dspine_mlx.server.grammar import constraint
from dspine_mlx.server.images import image_parts
from dspine_mlx.server.in_group import (
    STOP,
    Stopped,
    check_group,
    next_item,
    shareable,
    text_in_group,
)
from dspine_mlx.server.metrics import Metrics
from dspine_mlx.server.options import Options
from dspine_mlx.server.prompt_cache import PromptCache
from dspine_mlx.server.prompts import BoundedTokenizer
from dspine_mlx.server.provider import Provider
from dspine_mlx.server.stops import ReplyText

ONE_STEP = (None,)  # in place of mlx_lm's half a second between two looks for new requests
POLL = 0.1  # seconds between two checks of a waiting client's connection

STOP_SECONDS = 5.0  # that the generation thread may take to end


class ResponseGenerator(host.ResponseGenerator):
    def __init__(self, provider: Provider, prompt_cache: PromptCache, options: Options):
        self.options = options
        self.calls = Calls()
        self.handlers: set[Call] = set()  # calls whose HTTP threads still have to answer
        self.metrics = Metrics()
        self.load_failure: str | None = None
        self.again: deque[tuple] = deque()  # requests of a batch that failed
        self.batching = Batching(provider, prompt_cache, options, self.calls)
        super().__init__(provider, prompt_cache)
        if not self._is_distributed:
            self._time_budget: Any = ONE_STEP

    # ---- in the HTTP threads

    def generate(
        self,
        request: host.CompletionRequest,
        generation_args: host.GenerationArguments,
        progress_callback: Callable[[int, int], None] | None = None,
    ) -> tuple[host.GenerationContext | None, Iterator[host.Response]]:
        """Generate a reply. The call keeps any failure; the handler answers with it where mlx_lm
        begins its reply."""
        call = serving.get()
        self.handlers.add(call)
        args = Arguments(**vars(generation_args), call=call)
        try:
            context, responses = self.enqueued(request, args, progress_callback)
        except Failed:
            return None, iter(())
        return context, answered(responses, call)

    def enqueued(
        self, request: host.CompletionRequest, args: Arguments, progress: Any
    ) -> tuple[host.GenerationContext, Iterator[host.Response]]:
        try:
            self.prepare(request, args)
            self.calls.add(args.call)
            return super().generate(request, args, progress)
        except Exception as error:  # whatever the generation thread put on the queue
            raise args.call.fail(failed(error)) from error

    def prepare(self, request: host.CompletionRequest, args: Arguments) -> None:
        """Do work that may be slow or fail outside the one thread that all requests share:
        downloads, the chat template and the tokenizer (of the loaded model; another's run once it
        is loaded)."""
        provider = self.model_provider
        provider.check_names(args.model)
        provider.download(args.model)
        tokenizer = provider.loaded_tokenizer(args.model)
        if tokenizer is not None and not any(image_parts(request.messages)):
            args.prepared = tokenizer, self.tokenized(tokenizer, request, args)
            check_prompt(args.prepared[1][0], args, provider)

    def tokenized(self, tokenizer: Any, request: host.CompletionRequest, args: Arguments) -> tuple:
        bounded = BoundedTokenizer(tokenizer, self.model_provider.most_characters)
        try:
            return super()._tokenize(bounded, request, args)
        except InputError:
            raise
        except Exception as error:  # chat templates may raise anything; it is the request's fault
            raise InputError(f"this request can't be made a prompt: {error}") from error

    def _await_response(self, response_queue: Queue) -> Any:
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
        """Let go of a call that the HTTP thread is done with, whether or not it got its reply."""
        self.calls.remove(call)
        self.handlers.discard(call)
        self.metrics.finish(call)
        logging.info(call.summary())

    @property
    def stalled(self) -> bool:
        """Whether the generation thread has long made no step and is not loading a model."""
        loading = self.model_provider.loading
        return not loading and self.calls.heart.age > self.options.stall_seconds

    @property
    def is_healthy(self) -> bool:
        return self.generation_available() and not self.stalled

    @property
    def ended(self) -> bool:
        return not self._generation_thread.is_alive()

    @property
    def has_failed(self) -> bool:
        return bool(self._generation_failed)

    def stop_and_join(self) -> None:
        """Stop within STOP_SECONDS; `ended` says whether the thread has ended."""
        self.calls.close(Failed(503, "the server is stopping"))
        self._stop = True
        self._generation_thread.join(STOP_SECONDS)

    # ---- in the generation thread

    def _generate(self) -> None:
        try:
            self.model_provider.load_default()
        except LostRank:
            raise
        except (ValueError, OSError, RuntimeError) as error:
            self.load_failure = " ".join(str(error).split())
            return
        while not self._stop:
            try:
                super()._generate()
            except Stopped:
                break
            except Exception as error:  # of some request in a batch, or of one that has gone
                if self._is_distributed:
                    raise
                logging.exception("a batch failed; its requests go on one by one")
                self.take_up(error)
        if self._is_distributed and self._rank == 0:
            self._share_object(STOP)
        mx.clear_streams()  # at the thread's end they would race with the end of the process

    def take_up(self, error: Exception) -> None:
        """Resume the requests of a failed batch one by one, each from its last token. One that
        fails alone gets the error."""
        for reply, request, args in self.calls.in_progress():
            if args.call.alone:
                reply.put(error)
            else:
                args.call.alone = True
                args.call.path = "speculative" if args.call.drafted else "plain"
                if not args.call.drafted:
                    args.model = replace(args.model, draft=None)
                self.again.append((reply, request, args))

    def _next_request(self, timeout: float | None = None) -> tuple | None:
        self.calls.heart.beat()
        if self.again:
            return self.again.popleft()
        if self._is_distributed:
            return self.next_in_step(timeout)
        item = next_item(self.requests, timeout)
        return None if item is None else self.accepted(*item)

    def accepted(
        self, queue: Queue, request: host.CompletionRequest, args: Arguments
    ) -> tuple | None:
        """A request on its way to be served, or None if its client has gone."""
        reply = args.call.reply = Reply(queue, args.call, self.calls, self._is_distributed)
        if args.call.failure is not None:
            reply.put(args.call.failure)
            return None
        images = any(image_parts(request.messages))
        self.batching.choose_path(args, images, self._is_batchable)
        return self.calls.take(reply, request, args)

    def next_in_step(self, timeout: float | None) -> tuple | None:
        """The next request on every rank of a group, as rank 0 has accepted it."""
        part = self.model_provider.part
        check_group(part)
        if part is not None:  # until the next call, whatever comes between
            part.channel.watchdog.arm()
        if self._rank > 0:
            shared = self._share_object(None)
            if shared == STOP:
                raise Stopped
            return None if shared is None else (Queue(), *shared)
        item = next_item(self.requests, timeout)
        taken = None if item is None else self.accepted(*item)
        if taken is not None and not self.readable(*taken):
            taken = None
        self._share_object(None if taken is None else (taken[1], shareable(taken[2])))
        return taken

    def readable(self, reply: Reply, request: host.CompletionRequest, args: Arguments) -> bool:
        """Whether a request has a prompt that can be decoded; if not, it gets the error."""
        tokenizer = self.model_provider.tokenizer
        try:
            args.prepared = tokenizer, self._tokenize(tokenizer, request, args)
        except Exception as error:  # noqa: BLE001  # as in mlx_lm's own loops
            reply.put(error)
            return False
        return True

    def _is_batchable(self, args: Arguments) -> bool:
        if args.call.alone:
            return False
        if args.model.draft is None:
            return args.call.grammar is None and super()._is_batchable(args)
        return not self._is_distributed and self.batching.possible(args)

    def _tokenize(self, tokenizer: Any, request: host.CompletionRequest, args: Arguments) -> Any:
        call, provider = args.call, self.model_provider
        self.batching.arriving = args
        if self._rank > 0 and args.prepared is not None:
            return args.prepared[1]  # rank 0's
        provider.release()
        if args.prepared is not None and args.prepared[0] is tokenizer:
            prompt, *others = args.prepared[1]
        else:
            prompt, *others = self.tokenized(tokenizer, request, args)
        check_prompt(prompt, args, provider)
        if provider.vocab_size is not None:
            with same_random_state():
                try_sampling(prompt, args, tokenizer, provider.vocab_size)
        call.tools = bool(request.tools)
        call.reasoning = reasoning(
            "reasoning" in others, bool((args.chat_template_kwargs or {}).get("enable_thinking"))
        )
        if call.tokens:  # resumed
            prompt, args.max_tokens = prompt + call.tokens, args.max_tokens - len(call.tokens)
        return prompt, *others

    def _make_state_machine(self, model_key: Any, tokenizer: Any, stop_words: list[str]) -> Any:
        """Make mlx_lm's state machine for a request; stop strings are found in the text instead."""
        ends, machine = super()._make_state_machine(model_key, tokenizer, [])
        call = self.batching.arriving.call
        if call.text is None and (stop_words or call.tokens):
            call.text = ReplyText(stop_words, ends, tokenizer.detokenizer)
            for token in call.tokens:
                call.text.advance(token)
            call.text.take(last=False)  # the client has this text
        return call.text or ends, machine

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
        """Stand-in for mlx_lm's stream_generate, called by `_serve_single`."""
        args, call = self.current, self.current.call
        part = self.model_provider.part
        if part is not None and options.get("input_embeddings") is None:
            yield from self.in_group(part, tokenizer, prompt, draft_model, max_tokens, options)
            return
        if part is None:
            options["prompt_progress_callback"] = checked(call, options)
        options["max_tokens"] = max_tokens
        grammar = constraint(call, tokenizer)
        if call.tokens and args.seed is not None:  # resumed, after so many draws
            sampler = own_sampler(args, tokenizer, grammar)
            mx.random.state[0][:] = random_state(sampler, args.seed, len(call.tokens))
        if grammar is not None:
            options["logits_processors"] = [*options["logits_processors"], grammar]
        if draft_model is not None and options.get("input_embeddings") is None:
            options = drafting(options, args, tokenizer, grammar)
            options["lookup"] = self.options.lookup
            options["cached_tokens"] = call.prompt[: len(call.prompt) - len(prompt)]
            options["prompt_checkpoints"] = self.prompt_cache.checkpoints(
                self.model_provider.model_key, call.prompt, prompt, tokenizer.eos_token_ids
            )
            tokens = draft_generate(model, tokenizer, prompt, draft_model, **options)
        else:  # images: their rows are embeddings, which a drafter's prefill doesn't take
            del options["prompt_cache"][self.model_provider.target_caches :]
            tokens = plain_generate(model, tokenizer, prompt, **options)
        with closing(tokens):
            yield from tokens if part is not None else observed(tokens, call)

    def in_group(
        self,
        part: PartOfTarget,
        tokenizer: Any,
        prompt: list[int],
        drafter: Drafter | None,
        max_tokens: int,
        options: dict[str, Any],
    ) -> Iterator[Any]:
        """One text on several machines: rank 0's, which the others follow."""
        args, call = self.current, self.current.call
        checkpoints: dict[int, Any] = {}
        if call.path == "speculative":
            whole = args.prepared[1][0] if args.prepared is not None else prompt
            checkpoints = self.prompt_cache.checkpoints(
                self.model_provider.model_key, whole, prompt, tokenizer.eos_token_ids
            )
        options |= {"max_tokens": max_tokens, "lookup": self.options.lookup}
        options["prompt_checkpoints"] = checkpoints
        yield from text_in_group(part, tokenizer, prompt, drafter, options, args)
