"""Errors as clients see them: an HTTP status and OpenAI's error object."""

import json
import logging

from dspine_mlx.errors import InputError
from dspine_mlx.server.fields import FieldError

CLIENT_GONE = 499  # nginx's status for a client that closed the connection
CODES = {401: "invalid_api_key", 404: "not_found", 408: "request_timeout", 413: "request_too_large"}


class Failed(Exception):
    """A request that gets an error instead of a reply: an HTTP status and a sentence.

    param: the offending field of the request. code: an identifier for programs.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.param = status, param
        self.code = code or CODES.get(status)

    @property
    def body(self) -> bytes:
        return error_body(self.status, str(self), self.param, self.code)


class UnknownModel(FieldError):
    """A model, drafter or adapter that can't be loaded, or that this server may not load."""

    def __init__(self, message: str, param: str = "model"):
        super().__init__(param, message)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> bytes:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}).encode()


def failed(error: Exception) -> Failed:
    """Turn an exception into the error that a client gets."""
    if isinstance(error, Failed):
        return error
    if isinstance(error, UnknownModel):
        return Failed(404, str(error), error.param, "model_not_found")
    if isinstance(error, FieldError):
        return Failed(400, str(error), error.param, "invalid_value")
    if isinstance(error, InputError):
        return Failed(400, str(error))
    logging.error("a request failed", exc_info=error)
    return Failed(500, f"{type(error).__name__}: {error}")
