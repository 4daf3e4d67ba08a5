"""Does this mlx-lm have the server parts that drafting hooks into?"""

import inspect
from operator import attrgetter

import mlx_lm
import mlx_lm.server

from dspine_mlx.errors import InputError

WORKS_WITH = "mlx-lm 0.32.0 to 0.32.2"

SEAMS: dict[str, tuple[str, ...]] = {
    "run": ("host", "port", "model_provider"),
    "_run_http_server": ("host", "port", "response_generator", "server_class", "handler_class"),
    "main": (),
    "stream_generate": ("model", "tokenizer", "prompt", "max_tokens", "draft_model", "stream"),
    "BatchGenerator": (
        "model",
        "completion_batch_size",
        "prefill_batch_size",
        "prefill_step_size",
        "stream",
    ),
    "BatchGenerator.insert_segments": (
        "segments",
        "max_tokens",
        "caches",
        "all_tokens",
        "samplers",
        "logits_processors",
        "stop_sequences",
    ),
    "ModelProvider.load": ("model_path", "adapter_path", "draft_model_path"),
    "ModelProvider._load": ("model_path", "adapter_path", "draft_model_path"),
    "ModelProvider.load_default": (),
    "ModelProvider.reset": (),
    "ResponseGenerator.generate": ("request", "generation_args", "progress_callback"),
    "ResponseGenerator.generation_available": (),
    "ResponseGenerator.stop_and_join": (),
    "ResponseGenerator._generate": (),
    "ResponseGenerator._next_request": ("timeout",),
    "ResponseGenerator._is_batchable": ("args",),
    "ResponseGenerator._tokenize": ("tokenizer", "request", "args"),
    "ResponseGenerator._make_state_machine": ("model_key", "tokenizer", "stop_words"),
    "ResponseGenerator._serve_single": ("request", "stream"),
    "ResponseGenerator._await_response": ("response_queue",),
    "LRUPromptCache": ("max_size", "max_bytes"),
    "LRUPromptCache.fetch_nearest_cache": ("model", "tokens"),
    "LRUPromptCache.insert_cache": ("model", "tokens", "prompt_cache"),
    "APIHandler.do_GET": (),
    "APIHandler.do_POST": (),
    "APIHandler.validate_model_parameters": (),
    "APIHandler.handle_completion": ("request", "stop_words"),
    "APIHandler.generate_response": (),
    "APIHandler.handle_models_request": (),
    "APIHandler.completion_usage_response": (),
    "APIHandler._set_completion_headers": ("status_code",),
    "APIHandler._set_stream_headers": ("status_code",),
    "_make_sampler": ("args", "tokenizer"),
    "_make_logits_processors": ("args",),
    "GenerationArguments": ("model", "sampling", "max_tokens", "seed"),
    "ModelDescription": ("model", "draft", "adapter"),
    "SamplingArguments": ("temperature", "top_p", "top_k", "min_p"),
    "GenerationContext": ("prompt", "prompt_cache_count"),
    "Response": ("text", "token", "finish_reason"),
}


def check_host() -> None:
    """Raise `InputError` with the first part that is missing or has lost an argument."""
    for name, parameters in SEAMS.items():
        try:
            part = attrgetter(name)(mlx_lm.server)
        except AttributeError as error:
            raise InputError(unfit(f"has no mlx_lm.server.{name}")) from error
        lost = [p for p in parameters if p not in inspect.signature(part).parameters]
        if lost:
            raise InputError(unfit(f"has mlx_lm.server.{name} without {', '.join(lost)}"))


def unfit(problem: str) -> str:
    return f"mlx-lm {mlx_lm.__version__} {problem}; serving works with {WORKS_WITH}"
