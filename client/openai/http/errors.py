# SPDX-License-Identifier: Apache-2.0
"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with the right status and headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.responses import JSONResponse

from triton_omni.backends.wire import OmniError

RETRY_AFTER_S = 1.0
REQUEST = "invalid_request_error"

_KINDS: dict[str, tuple[str, str]] = {
    "bad_request": (REQUEST, "invalid_value"),
    "not_found": (REQUEST, "model_not_found"),
    "too_busy": ("rate_limit_error", "rate_limit_exceeded"),
    "unavailable": ("server_error", "model_not_ready"),
    "cancelled": ("server_error", "client_cancelled"),
    "deadline_exceeded": ("server_error", "deadline_exceeded"),
    "stage_failed": ("server_error", "stage_failed"),
    "internal": ("server_error", "internal_error"),
}
"""Our code → OpenAI's type and code."""

_WORTH_A_RETRY = frozenset({429, 503})
"""Nothing was started. SDKs repeat every 5xx and 409 by themselves; for other statuses that only doubles the work."""

ParamOf = Callable[[str], str | None]
"""A field of our request → the OpenAI parameter it came from."""


class ApiError(Exception):
    """An error response. `param` names the field of the OpenAI request."""

    def __init__(
        self, status: int, message: str, *, code: str = "invalid_value", param: str | None = None, kind: str = REQUEST
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind
        self.retry_after_s = RETRY_AFTER_S if status in _WORTH_A_RETRY else None
        self.closes = status == 408  # the rest of the body may come at any time

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body; a stream that fails midway sends it as an event."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        """Whether to try again, and whether the connection closes."""
        headers = {"connection": "close"} if self.closes else {}
        if self.retry_after_s is not None:
            return headers | {"retry-after": f"{max(1, round(self.retry_after_s))}"}
        return headers | ({"x-should-retry": "false"} if self.status >= 409 else {})

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body, self.status, headers=dict(self.headers))


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 about one parameter."""
    return ApiError(400, message, code=code, param=param)


def missing(param: str) -> ApiError:
    """A 400 about a required parameter that was not sent."""
    return invalid(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")


def unsupported(param: str, message: str) -> ApiError:
    """A 400 about something that OpenAI defines and this server does not support."""
    return invalid(param, message, "unsupported_value")


def of_omni(error: OmniError, param_of: ParamOf = lambda where: where or None) -> ApiError:
    """A server's error as an HTTP error."""
    kind, code = _KINDS[error.code]
    is_field = error.code == "bad_request"
    message = error.message if is_field or not error.where else f"{error.where}: {error.message}"
    mapped = ApiError(error.status, message, code=code, param=param_of(error.where) if is_field else None, kind=kind)
    if error.retry_after_s is not None:
        mapped.retry_after_s = error.retry_after_s
    return mapped
