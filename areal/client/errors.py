"""Errors of calls to a service, classified by who is to blame.

ClientError
|- CallerError            the request is invalid, and a retry would fail as well: 4xx
|  |- Unauthorized            a missing or wrong key: 401, 403
|  |- UnknownName             an unknown or deleted model, session, trajectory or export: 404, 410
|  |- StateConflict           a conflict with the current state: 409, 422
|  `- NotReady                a trajectory that has no reward yet: 425
|- ServiceError           the service or its engine failed on a valid request: 5xx
|  `- Overloaded              the service is overloaded or unavailable: 429, 503
`- InfrastructureError    there is no response
   |- Unreachable             the connection was refused or timed out; the call did not start
   |- ConnectionLost          the connection broke after the call had started
   `- DeadlineExceeded        the call took longer than the caller allows

A ServiceError or InfrastructureError says nothing about a rollout: it is retried or dropped, never scored 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar

from areal.errors import ArealError


class Blame(StrEnum):
    CALLER = "caller"
    SERVICE = "service"
    INFRASTRUCTURE = "infrastructure"


class ClientError(ArealError):
    """A call failed. ``status`` 0: no response. ``code`` is for programs, ``param`` names the invalid field."""

    blame: ClassVar[Blame] = Blame.SERVICE

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        code: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
        retry_after_s: float | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint, detail=f"request {request_id}" if request_id else None)
        self.status = status
        self.code = code
        self.param = param
        self.request_id = request_id
        self.retry_after_s = retry_after_s


class CallerError(ClientError):
    blame = Blame.CALLER


class Unauthorized(CallerError):
    pass


class UnknownName(CallerError):
    pass


class StateConflict(CallerError):
    pass


class NotReady(CallerError):
    pass


class ServiceError(ClientError):
    blame = Blame.SERVICE


class Overloaded(ServiceError):
    pass


class InfrastructureError(ClientError):
    blame = Blame.INFRASTRUCTURE


class Unreachable(InfrastructureError):
    pass


class ConnectionLost(InfrastructureError):
    pass


class DeadlineExceeded(InfrastructureError):
    pass


_BY_STATUS: dict[int, type[ClientError]] = {
    401: Unauthorized,
    403: Unauthorized,
    404: UnknownName,
    409: StateConflict,
    410: UnknownName,
    422: StateConflict,
    425: NotReady,
    429: Overloaded,
    503: Overloaded,
}


def error_of_answer(status: int, body: object, headers: Mapping[str, str], what: str) -> ClientError:
    """Return the typed error of a response with an error status. ``body``: decoded JSON, or text."""
    found = body.get("error") if isinstance(body, Mapping) else None
    error: Mapping[str, object] = found if isinstance(found, Mapping) else {}
    kind = _BY_STATUS.get(status) or (CallerError if status < 500 else ServiceError)
    message = error.get("message")
    return kind(
        f"{what}: {message if message else f'answered {status}: {str(body)[:200]}'}",
        status=status,
        code=_text(error.get("code")),
        param=_text(error.get("param")),
        request_id=_text(error.get("request_id")) or headers.get("x-request-id"),
        retry_after_s=_seconds(headers.get("Retry-After")),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _seconds(text: str | None) -> float | None:
    """Return ``Retry-After`` in seconds; None for the form with a date, which the services do not use."""
    return float(text) if text is not None and text.isascii() and text.isdecimal() else None
