"""Errors as OpenAI words them. Every response that is not a success is made here."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from headstart.core.errors import ErrorCode, RequestError
from headstart.gateway.api.response_bodies import ErrorBody, ErrorDetail
from headstart.gateway.stream import ChoiceFailure

STATUS = {
    ErrorCode.INVALID: 400,
    ErrorCode.TOO_LONG: 400,
    ErrorCode.BUSY: 429,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.DEADLINE: 504,
    ErrorCode.CANCELLED: 499,
    ErrorCode.MISMATCH: 503,
    ErrorCode.WORKER_LOST: 502,
    ErrorCode.INTERNAL: 500,
}
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
INTERNAL_MESSAGE = "internal error; the server's log has the reason"


class ApiError(Exception):
    """Ends an HTTP request with `status`."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def from_request_error(error: RequestError) -> ApiError:
    return ApiError(STATUS[error.code], error.message, error.param, error.code.value)


def from_failure(failure: ChoiceFailure) -> ApiError:
    """What the client gets to know of a failed choice: never an internal message."""
    internal = failure.code is ErrorCode.INTERNAL
    if failure.code is ErrorCode.TOO_LONG:
        return ApiError(400, too_long_message(failure.message), code="context_length_exceeded")
    return ApiError(STATUS[failure.code], INTERNAL_MESSAGE if internal else failure.message, code=failure.code.value)


def too_long_message(reason: str) -> str:
    """The phrases that clients know an overflow by."""
    if "this model's maximum context length is" in reason and "prompt is too long" in reason:
        return reason
    return f"this model's maximum context length is exceeded, the prompt is too long: {reason}"


def error_body(error: ApiError) -> ErrorBody:
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return ErrorBody(ErrorDetail(error.message, kind, error.param, error.code))


def json_response(body: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    headers: Mapping[str, str] = {}
    if error.status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    elif error.status in (429, 503):
        headers = {"Retry-After": "1"}
    elif error.status == 408:
        headers = {"Connection": "close"}  # what is still to come of the body is not read
    return json_response(error_body(error), error.status, headers)
