"""The errors a client can receive, and which of them the engine's exceptions become."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from engine.client import EngineDeadError, QueueFullError
from engine.request import ContextLengthError, SamplingParams

QUEUE_RETRY_AFTER_S = 1
STARTING_RETRY_AFTER_S = 5

_FIRST_WORD = re.compile(r"[a-z_]+")
_SAMPLING_FIELDS = frozenset(SamplingParams.__struct_fields__)


MAX_SHOWN_NAME_CHARS = 128


class ErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    """The value of `error` in an error body or an error event."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every response that is no success."""

    error: ErrorObject


class ApiError(Exception):
    """A failure with an HTTP status. Raise one of the subclasses.

    `headers` are extra response headers; they are lost when the error ends a stream.
    """

    def __init__(
        self, status: int, error: ErrorObject, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(error.message)
        self.status = status
        self.error = error
        self.headers = headers or {}

    @property
    def body(self) -> ErrorBody:
        """What goes over the wire, as a response body or as an event."""
        return ErrorBody(self.error)


class BadRequestError(ApiError):
    """The request itself is at fault; `param` names the field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        error = ErrorObject(message=message, type="invalid_request_error", param=param, code=code)
        super().__init__(400, error)


class AuthenticationError(ApiError):
    """No API key, or a wrong one."""

    def __init__(self) -> None:
        error = ErrorObject(
            message="Missing or wrong API key: send it as 'Authorization: Bearer KEY'.",
            type="invalid_request_error",
            code="invalid_api_key",
        )
        super().__init__(401, error, {"www-authenticate": "Bearer"})


class ModelNotFoundError(ApiError):
    """The request names a model that is not served here."""

    def __init__(self, name: str, served: Collection[str]) -> None:
        shown = name[:MAX_SHOWN_NAME_CHARS]
        error = ErrorObject(
            message=f"The model {shown!r} does not exist here. Served: {', '.join(served)}.",
            type="invalid_request_error",
            param="model",
            code="model_not_found",
        )
        super().__init__(404, error)


class RouteNotFoundError(ApiError):
    """No endpoint has this path."""

    def __init__(self, method: str, path: str) -> None:
        error = ErrorObject(
            message=f"Unknown request URL: {method} {path}.",
            type="invalid_request_error",
            code="unknown_url",
        )
        super().__init__(404, error)


class MethodNotAllowedError(ApiError):
    """The endpoint exists but not for this method."""

    def __init__(self, method: str, path: str, allowed: str) -> None:
        error = ErrorObject(
            message=f"{path} does not accept {method}; use {allowed}.",
            type="invalid_request_error",
            code="method_not_allowed",
        )
        super().__init__(405, error, {"allow": allowed})


class BodyTooLargeError(ApiError):
    """The body is over the limit. The rest of it is not read, so the connection ends."""

    def __init__(self, max_bytes: int) -> None:
        error = ErrorObject(
            message=f"The request body is larger than {max_bytes} bytes.",
            type="request_too_large",
            code="request_too_large",
        )
        super().__init__(413, error, {"connection": "close"})


class OverloadedError(ApiError):
    """The engine's queue is full."""

    def __init__(self) -> None:
        error = ErrorObject(
            message="The queue is full. Try again in a moment.",
            type="overloaded",
            code="overloaded",
        )
        super().__init__(503, error, {"retry-after": str(QUEUE_RETRY_AFTER_S)})


class UnavailableError(ApiError):
    """The server is up but does not take requests (starting, draining)."""

    def __init__(self, message: str) -> None:
        error = ErrorObject(message=message, type="service_unavailable", code="service_unavailable")
        super().__init__(503, error, {"retry-after": str(STARTING_RETRY_AFTER_S)})


class InternalError(ApiError):
    """A fault on this side. `is_final` tells the client that a retry would fail as well."""

    def __init__(
        self, message: str = "The server had an internal error.", *, is_final: bool = False
    ) -> None:
        error = ErrorObject(message=message, type="server_error", code="internal_error")
        super().__init__(500, error, {"x-should-retry": "false"} if is_final else None)


def engine_error(error: QueueFullError | EngineDeadError) -> ApiError:
    """What a client is told when the engine client raises."""
    if isinstance(error, QueueFullError):
        return OverloadedError()
    return InternalError("The engine has stopped; this request did not finish.")


def refusal(error: ValueError, *, prompt_field: str) -> BadRequestError:
    """The 400 for a ValueError of `engine.request`, whose text begins with the field's name.

    `prompt_field` is what this endpoint calls the prompt.
    """
    if isinstance(error, ContextLengthError):
        return BadRequestError(str(error), prompt_field, "context_length_exceeded")
    match = _FIRST_WORD.match(str(error))
    name = match.group() if match else ""
    if name == "prompt":
        return BadRequestError(str(error), prompt_field)
    return BadRequestError(str(error), name if name in _SAMPLING_FIELDS else None)
