"""What goes wrong in a request, in the form that OpenAI's clients know."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """An error with its HTTP status; `param` names the field of the request that caused it."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.type = type
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        detail = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        # what the client sent may hold lone surrogates, which cannot be written as UTF-8
        return {
            "error": {
                key: value and value.encode("utf-8", "backslashreplace").decode() for key, value in detail.items()
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def queue_full(waiting: int, limit: int) -> ApiError:
    return ApiError(
        429,
        f"{waiting} requests are running or waiting, and the server takes {limit} at most; try again later",
        code="queue_full",
        type="rate_limit_error",
        retry_after=1,
    )


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", type="server_error", retry_after=5)


def engine_failed(error: BaseException) -> ApiError:
    return ApiError(
        500, f"the engine failed while it ran this request ({type(error).__name__}: {error})", type="server_error"
    )
