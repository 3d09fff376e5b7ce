"""Errors as OpenAI words them. Every response that is not a success is made here."""

from collections.abc import Mapping

from fastapi.responses import JSONResponse

from headstart.core.errors import ErrorCode, RequestError
from headstart.gateway.stream import Failure

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
INTERNAL_MESSAGE = "internal error; the server's log tells more"


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


def from_failure(failure: Failure) -> ApiError:
    """What the client is told of a failed choice: never an internal message."""
    internal = failure.code is ErrorCode.INTERNAL
    code = "context_length_exceeded" if failure.code is ErrorCode.TOO_LONG else failure.code.value
    return ApiError(STATUS[failure.code], INTERNAL_MESSAGE if internal else failure.message, code=code)


def error_body(error: ApiError) -> dict[str, object]:
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: ApiError) -> JSONResponse:
    headers: Mapping[str, str] = {}
    if error.status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    elif error.status in (429, 503):
        headers = {"Retry-After": "1"}
    elif error.status == 408:
        headers = {"Connection": "close"}  # what is still to come of the body is not read
    return JSONResponse(error_body(error), error.status, headers=headers)
