"""The one error tree. Each error knows the HTTP status, the OpenAI error type and the reason."""

from __future__ import annotations

import msgspec


class CalinixError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigError(CalinixError):
    """The configuration cannot be used; `problems` says where and why, one line each."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join(problems))


class HttpError(CalinixError):
    """A refusal that a client sees: OpenAI's shape, a true status."""

    status = 500
    type = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The JSON body in OpenAI's error shape."""
        return error_body(self.message, self.type, self.param, self.code)


def error_body(
    message: str, error_type: str, param: str | None = None, code: str | None = None
) -> bytes:
    """`{"error": {message, type, param, code}}` as bytes."""
    return msgspec.json.encode(
        {"error": {"message": message, "type": error_type, "param": param, "code": code}}
    )


class BadRequest(HttpError):
    """The request is not one that can be understood."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(HttpError):
    """No gateway API key, or a wrong one."""

    status = 401
    type = "authentication_error"


class Forbidden(HttpError):
    """Asked from where nobody may ask: a web page that is not the gateway's own."""

    status = 403
    type = "permission_error"


class NotFound(HttpError):
    """No such path or model."""

    status = 404
    type = "not_found_error"


class MethodNotAllowed(HttpError):
    """The path exists, the method does not."""

    status = 405
    type = "invalid_request_error"


class RequestTimeout(HttpError):
    """The client took too long to send its request."""

    status = 408
    type = "invalid_request_error"


class PayloadTooLarge(HttpError):
    """The body is over `gateway.limits.bodyBytes`."""

    status = 413
    type = "invalid_request_error"


class HeadersTooLarge(HttpError):
    """The request head is over `gateway.limits.headerBytes`."""

    status = 431
    type = "invalid_request_error"


class TooManyRequests(HttpError):
    """Every pod is full and the wait queue, or the wait, is at its bound."""

    status = 429
    type = "rate_limit_error"


class BadGateway(HttpError):
    """The pod broke off, or answered what is not HTTP."""

    status = 502
    type = "upstream_error"


class NoPod(HttpError):
    """No pod can take the request at present."""

    status = 503
    type = "service_unavailable_error"


class GatewayTimeout(HttpError):
    """The pod did not answer within its time-out."""

    status = 504
    type = "upstream_timeout_error"
