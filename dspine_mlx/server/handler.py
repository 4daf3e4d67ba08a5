"""mlx_lm.server's APIHandler with a key, limits, errors as JSON, statistics and metrics."""

import hmac
import io
import json
import logging
import time
from contextlib import suppress
from typing import Any

from mlx_lm import server as host

from dspine_mlx.errors import InputError
from dspine_mlx.server.call import Call, serving
from dspine_mlx.server.connections import Server
from dspine_mlx.server.failure import CLIENT_GONE, Failed, error_body, failed
from dspine_mlx.server.fields import FieldError
from dspine_mlx.server.generator import ResponseGenerator
from dspine_mlx.server.grammar import compile_format
from dspine_mlx.server.health import health
from dspine_mlx.server.images import image_parts, inline_images
from dspine_mlx.server.metrics import CONTENT_TYPE
from dspine_mlx.server.page import HEADERS, PAGE, figures, password
from dspine_mlx.server.provider import DEFAULT
from dspine_mlx.server.validation import checked, parse_body

POSTS = ("/v1/completions", "/v1/chat/completions", "/chat/completions")
SMALL, LARGE = 1 << 20, 1 << 24  # bytes of a refused body that are read and discarded
UNAUTHORIZED = Failed(401, "this server needs its API key as 'Authorization: Bearer KEY'")


class Handler(host.APIHandler):
    response_generator: ResponseGenerator
    server: Server

    def __init__(self, response_generator: ResponseGenerator, *args: Any, **kwargs: Any):
        self.options = response_generator.options
        self.timeout = self.options.idle_timeout  # of every read and write on the connection
        self.call: Call | None = None
        self.answered = False
        self.made_tool_call = False
        self.unwanted = SMALL  # bytes to take of a body that is not read
        super().__init__(response_generator, *args, **kwargs)

    # ---- routes

    def do_GET(self) -> None:
        route = self.path.partition("?")[0]
        if route == "/health":
            self.handle_health_check()
        elif route in ("/", "/figures"):
            self.handle_page(route)
        elif not self.authorized():
            self.refuse(UNAUTHORIZED)
        elif route == "/metrics":
            self.reply(200, self.metrics_text().encode(), CONTENT_TYPE)
        elif route.startswith("/v1/models"):
            super().do_GET()
        else:
            self.refuse(Failed(404, f"there is no {route} here"))

    def do_POST(self) -> None:
        try:
            self.body = self.checked_body()
            self.grammar = compile_format(self.body.get("response_format"))
            self.take_images(self.body.get("messages") or [])
            raw = json.dumps(self.body).encode()
            self.rfile = io.BytesIO(raw)  # mlx_lm reads and parses the body again
            self.headers.replace_header("Content-Length", str(len(raw)))
            super().do_POST()
        except (InputError, Failed) as error:
            self.refuse(failed(error))
            self.discard_body()
        except OSError:
            raise
        except Exception as error:  # our fault, not the client's: answer rather than cut it off
            logging.exception("a request failed")
            self.fail_late(Failed(500, f"{type(error).__name__}: {error}"))

    def parse_request(self) -> bool:
        """Read the head, if it can be read; the body may take `idle_timeout` more."""
        parsed = super().parse_request()
        self.slot = self.server.connections.wait(self.connection, self.options.idle_timeout)
        return parsed

    def checked_body(self) -> dict[str, Any]:
        if not self.authorized():
            raise UNAUTHORIZED
        if self.path not in POSTS:
            raise Failed(404, f"there is no {self.path} here; post to one of {', '.join(POSTS)}")
        return checked(parse_body(self.read_body(self.body_length())), self.path)

    def body_length(self) -> int:
        if self.headers.get("Transfer-Encoding") is not None:
            raise Failed(411, "the request's body is chunked; send it with a Content-Length header")
        lengths = set(self.headers.get_all("Content-Length", []))
        if not lengths:
            raise Failed(411, "the request needs a Content-Length header")
        length, limit = lengths.pop(), self.options.max_request_bytes
        if lengths or not (length.isascii() and length.isdecimal()):
            raise InputError(f"Content-Length is {length[:40]!r}; it must be one number of bytes")
        if len(length.lstrip("0")) > 15 or int(length) > limit:
            self.unwanted = LARGE
            raise Failed(
                413, f"the request has {length[:40]} bytes; this server takes up to {limit}"
            )
        return int(length)

    def read_body(self, length: int) -> bytes:
        """Read the body; the connection's deadline ends a read that takes too long."""
        try:
            raw, late = self.rfile.read(length), False
        except TimeoutError:
            raw, late = b"", True
        if len(raw) < length and (late or self.slot.late):
            raise Failed(408, "the request body did not arrive in time")
        if len(raw) < length:
            raise InputError(f"the request body ended after {len(raw)} of {length} bytes")
        self.unwanted = 0
        self.server.connections.arrived(self.connection)
        return raw

    def take_images(self, messages: list[Any]) -> None:
        """Fetch images, but not for a model that takes none or is not loaded."""
        if not any(image_parts(messages)):
            return
        wanted = host.ModelDescription(
            self.body.get("model", DEFAULT), DEFAULT, self.body.get("adapters")
        )
        if not self.response_generator.model_provider.takes_images(wanted):
            raise FieldError("messages", "the messages have images; this model takes text only")
        inline_images(messages, self.options.allow_private_images)

    def discard_body(self) -> None:
        """Read what the client still sends, up to a limit. Closing early would reset the
        connection, and the client might never read the answer."""
        self.connection.settimeout(0.2)
        left, end = self.unwanted, time.monotonic() + 2
        with suppress(OSError):
            while left > 0 and time.monotonic() < end and (chunk := self.rfile.read1(1 << 16)):
                left -= len(chunk)

    def validate_model_parameters(self) -> None:
        try:
            super().validate_model_parameters()
        except (TypeError, ValueError) as error:  # mlx-lm catches not all of its own
            raise InputError(str(error)) from error

    def authorized(self) -> bool:
        if self.options.api_key is None:
            return True
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")  # its bytes
        return any(hmac.compare_digest(given, b"Bearer " + key) for key in self.options.key_bytes)

    def handle_page(self, route: str) -> None:
        """The page and its figures, which a browser may also ask for with the key as a password. No
        other origin can read them."""
        given = password(self.headers.get("Authorization", ""))
        keys = self.options.key_bytes if given is not None else ()
        if not self.authorized() and not any(hmac.compare_digest(given or b"", k) for k in keys):
            content, kind = UNAUTHORIZED.body, "application/json"
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="dspine-mlx", charset="UTF-8"')
        else:
            state = json.dumps(figures(self.response_generator)) if route == "/figures" else ""
            content, kind = state.encode() or PAGE, "application/json" if state else "text/html"
            self.send_response(200)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

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
        except OSError as error:  # no reader, or too slow a one, at the other end
            self.call.fail(Failed(CLIENT_GONE, str(error)))
            raise
        finally:
            serving.reset(token)
            self.response_generator.release(self.call)

    def fail_late(self, error: Failed) -> None:
        """Send an error after mlx_lm has begun its reply: whole replies have not been sent yet."""
        if self.answered:
            self.wfile.write(b"data: " + error.body + b"\n\n")
        else:
            self._headers_buffer: list[bytes] = []
            self.refuse(error)

    def generate_response(
        self, text: str, finish_reason: str | None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        self.made_tool_call |= bool(kwargs.get("tool_calls"))
        if finish_reason == "length" and self.call is not None and self.call.stopped:
            finish_reason = "tool_calls" if self.made_tool_call else "stop"
        response = super().generate_response(text, finish_reason, *args, **kwargs)
        return self.with_statistics(response)

    def completion_usage_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.with_statistics(super().completion_usage_response(*args, **kwargs))

    def with_statistics(self, response: dict[str, Any]) -> dict[str, Any]:
        if "usage" in response and self.call is not None:
            response["usage"]["dspine"] = self.call.usage()
        return response

    # ---- answers

    def _set_completion_headers(self, status_code: int = 200) -> None:
        self.begin()
        super()._set_completion_headers(status_code)

    def _set_stream_headers(self, status_code: int = 200) -> None:
        self.begin()
        super()._set_stream_headers(status_code)

    def begin(self) -> None:
        """Begin mlx_lm's reply, or answer with an error if the call has failed by now."""
        if self.call is not None:
            self.call.check()

    def end_headers(self) -> None:
        super().end_headers()
        self.answered = True

    def refuse(self, failure: Failed) -> None:
        if self.call is None:
            self.response_generator.metrics.refuse(failure.status)
        self.reply(failure.status, failure.body, "application/json")

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
        """Send the base class's own errors (a malformed request line, an unknown method) as
        JSON."""
        self.close_connection = True
        content = error_body(code, message or self.responses[code][0])
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def handle_models_request(self) -> None:
        """List the cached Hub models that requests may name."""
        allowed = self.response_generator.model_provider.allowed("model")
        if allowed is None:
            return super().handle_models_request()
        names = sorted(allowed - {DEFAULT})
        models = [{"id": name, "object": "model", "created": self.created} for name in names]
        content = json.dumps({"object": "list", "data": models}).encode()
        return self.reply(200, content, "application/json")

    def handle_health_check(self) -> None:
        state = health(self.response_generator)
        status = 200 if self.response_generator.is_healthy else 503
        self.reply(status, json.dumps(state).encode(), "application/json")

    def metrics_text(self) -> str:
        generator = self.response_generator
        return generator.metrics.text(
            {
                "requests_in_progress": len(generator.calls),
                "requests_queued": generator.requests.qsize(),
                "connections": len(self.server.connections),
                "prompt_cache_bytes": generator.prompt_cache.nbytes,
                "prompt_cache_sequences": len(generator.prompt_cache),
            }
        )
