"""What either end of HTTP/1.1 refuses a message with."""

from __future__ import annotations

from calinix.errors import CalinixError, HttpError


class FramingError(CalinixError):
    """The bytes are not HTTP/1.1 as we accept it. The message says what is wrong."""


class NotServedError(HttpError):
    """A method or an upgrade that this server does not speak."""

    status = 501
    type = "invalid_request_error"


class VersionError(HttpError):
    """An HTTP version other than 1.0 and 1.1."""

    status = 505
    type = "invalid_request_error"


class ExpectationError(HttpError):
    """An `Expect` other than 100-continue."""

    status = 417
    type = "invalid_request_error"


class OverloadedError(HttpError):
    """The server holds as many connections or request bytes as it may."""

    status = 503
    type = "service_unavailable_error"
