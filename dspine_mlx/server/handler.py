"""mlx_lm.server's APIHandler with a key, limits, errors as JSON, statistics and metrics."""

import hmac
import io
import json
from contextlib import suppress
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm import server as host

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.server.call import CLIENT_GONE, Call, Failed, serving
from dspine_mlx.server.generator import ResponseGenerator
from dspine_mlx.server.grammar import compile_format
from dspine_mlx.server.metrics import CONTENT_TYPE
from dspine_mlx.server.validation import check_body, parse_body

POSTS = ("/v1/completions", "/v1/chat/completions", "/chat/completions")
MOST_DISCARDED = 1 << 26  # bytes of a refused request's body


class Handler(host.APIHandler):
    response_generator: ResponseGenerator

    def __init__(self, response_generator: ResponseGenerator, *args: Any, **kwargs: Any):
        self.options = response_generator.options
        self.timeout = self.options.idle_timeout  # of every read and write on the connection
        self.call: Call | None = None
        self.answered = False
        super().__init__(response_generator, *args, **kwargs)

    # ---- routes

    def do_GET(self) -> None:
        route = self.path.partition("?")[0]
        if route == "/health":
            self.handle_health_check()
        elif not self.authorized():
            self.refuse(401, "this server needs its API key as 'Authorization: Bearer KEY'")
        elif route == "/metrics":
            self.reply(200, self.metrics_text().encode(), CONTENT_TYPE)
        elif route.startswith("/v1/models"):
            super().do_GET()
        else:
            self.refuse(404, f"there is no {route} here")

    def do_POST(self) -> None:
        try:
            self.body = self.checked_body()
            self.grammar = compile_format(self.body.get("response_format"))
            raw = json.dumps(self.body).encode()
            self.rfile = io.BytesIO(raw)  # mlx_lm reads and parses the body again
            self.headers.replace_header("Content-Length", str(len(raw)))
            super().do_POST()
        except InputError as error:
            self.refuse(400, str(error))
        except Failed as error:
            self.refuse(error.status, str(error))
            self.discard_body()

    def checked_body(self) -> dict[str, Any]:
        if not self.authorized():
            raise Failed(401, "this server needs its API key as 'Authorization: Bearer KEY'")
        if self.path not in POSTS:
            raise Failed(404, f"there is no {self.path} here; post to one of {', '.join(POSTS)}")
        length = self.headers.get("Content-Length")
        if length is None:
            raise Failed(411, "the request needs a Content-Length header")
        if not length.isdecimal():
            raise InputError(f"Content-Length is {length!r}; it must be a number of bytes")
        limit = self.options.max_request_bytes
        if int(length) > limit:
            raise Failed(413, f"the request has {length} bytes; this server takes up to {limit}")
        try:
            raw = self.rfile.read(int(length))
        except TimeoutError as error:
            raise Failed(408, "the request body did not arrive in time") from error
        if len(raw) < int(length):
            raise InputError(f"the request body ended after {len(raw)} of {length} bytes")
        body = parse_body(raw)
        check_body(body, self.path)
        if body.get("stream_options") is not None:
            body["stream_options"].setdefault("include_usage", False)
        return body

    def discard_body(self) -> None:
        """Take what the client still sends: closing on it would reset the connection, and the
        client might never read the answer."""
        self.connection.settimeout(1.0)
        left = MOST_DISCARDED
        with suppress(OSError):
            while left > 0 and (chunk := self.rfile.read1(1 << 16)):
                left -= len(chunk)

    def validate_model_parameters(self) -> None:
        try:
            super().validate_model_parameters()
        except (TypeError, ValueError) as error:  # mlx-lm catches not all of its own
            raise InputError(str(error)) from error

    def authorized(self) -> bool:
        if self.options.api_key is None:
            return True
        given = self.headers.get("Authorization", "").encode()
        return hmac.compare_digest(given, f"Bearer {self.options.api_key}".encode())

    # ---- completions

    def handle_completion(self, request: host.CompletionRequest, stop_words: list[str]) -> None:
        length = self.body.get("verify_length", self.body.get("num_draft_tokens"))
        length = self.options.verify_length if length is None else length
        self.call = Call(self.connection, length, self.grammar)
        token = serving.set(self.call)
        try:
            super().handle_completion(request, stop_words)
        except Failed as error:
            self.fail_late(error)
        except OSError as error:  # nobody, or too slow a reader, at the other end
            self.call.fail(Failed(CLIENT_GONE, str(error)))
            raise
        finally:
            serving.reset(token)
            self.response_generator.release(self.call)

    def fail_late(self, error: Failed) -> None:
        """An error after mlx_lm has begun its reply: whole replies have not been sent yet."""
        if self.answered:
            self.wfile.write(f"data: {json.dumps({'error': str(error)})}\n\n".encode())
        else:
            self._headers_buffer.clear()
            self.refuse(error.status, str(error))

    def generate_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.with_statistics(super().generate_response(*args, **kwargs))

    def completion_usage_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.with_statistics(super().completion_usage_response(*args, **kwargs))

    def with_statistics(self, response: dict[str, Any]) -> dict[str, Any]:
        if "usage" in response and self.call is not None:
            response["usage"]["dspine"] = self.call.usage()
        return response

    # ---- answers

    def _set_completion_headers(self, status_code: int = 200) -> None:
        """mlx_lm answers 404 to whatever goes wrong before the first token; say what it was."""
        if status_code == 404 and self.call is not None and self.call.failure is not None:
            status_code = self.call.failure.status
        super()._set_completion_headers(status_code)

    def end_headers(self) -> None:
        super().end_headers()
        self.answered = True

    def refuse(self, status: int, message: str) -> None:
        if self.call is None:
            self.response_generator.metrics.refuse(status)
        self.reply(status, json.dumps({"error": message}).encode(), "application/json")

    def reply(self, status: int, content: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self._set_cors_headers()
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The base class's own errors (a malformed request line, an unknown method) as JSON."""
        self.close_connection = True
        content = json.dumps({"error": message or self.responses[code][0]}).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def handle_health_check(self) -> None:
        generator, provider = self.response_generator, self.response_generator.model_provider
        healthy = generator.is_healthy
        draft, drafter = next(iter(provider.drafters.items()), (None, None))
        state = {
            "status": "ok" if healthy else "unavailable",
            "loaded": provider.model is not None,
            "model": provider.model_key[0] if provider.model_key else None,
            "draft_model": draft,
            "drafter": type(drafter.network).__name__ if drafter is not None else None,
            "verify_length": self.options.verify_length,
            "kernels": kernels(self.options.kernels, drafter),
            "requests": len(generator.calls),
            "versions": {
                "dspine_mlx": dspine_mlx.__version__,
                "mlx_lm": mlx_lm.__version__,
                "mlx": mx.__version__,
            },
        }
        self.reply(200 if healthy else 503, json.dumps(state).encode(), "application/json")

    def metrics_text(self) -> str:
        generator = self.response_generator
        return generator.metrics.text(
            {
                "requests_in_progress": len(generator.calls),
                "requests_queued": generator.requests.qsize(),
                "prompt_cache_bytes": generator.prompt_cache.nbytes,
                "prompt_cache_sequences": len(generator.prompt_cache),
            }
        )


def kernels(mode: str, drafter: Drafter | None) -> dict[str, Any]:
    """Whether Metal kernels are on, why or why not, and what their checks said."""
    checks = drafter.kernels.report()["checks"] if drafter is not None else []
    if mode == "off":
        why = "switched off by --kernels off"
    elif not mx.metal.is_available():
        why = "this machine has no Metal; plain MLX operations are used"
    elif drafter is None:
        why = "no drafter is loaded"
    else:
        return {"on": True, "why": "each kernel that passes its check runs", "checks": checks}
    return {"on": False, "why": why, "checks": checks}
