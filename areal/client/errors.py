"""Errors of calls to a service, by who is to blame.

ClientError
|- CallerError            the call is wrong, and will be so again: 4xx
|  |- Unauthorized            no key, or the wrong one: 401, 403
|  |- UnknownName             no such model, session, trajectory, export, or no more: 404, 410
|  |- StateConflict           what is there does not allow it: 409, 422
|  `- NotReady                a trajectory that has no reward yet: 425
|- ServiceError           the service or its engine failed at a good call: 5xx
|  `- Overloaded              too much to do, or nobody there to do it: 429, 503
`- InfrastructureError    there is no answer
   |- Unreachable             nobody listens; the call never began
   |- ConnectionLost          it began, and the connection broke
   `- DeadlineExceeded        it took longer than the caller allows

A failed call of the last two kinds says nothing about a rollout: it is repeated or discarded, never scored as 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

from areal.errors import ArealError


class Blame(StrEnum):
    CALLER = "caller"
    SERVICE = "service"
    INFRASTRUCTURE = "infrastructure"


class ClientError(ArealError):
    """``status`` 0: no answer. ``code`` is for programs, ``param`` names the offending field."""

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
    """The typed error of an answer with an error status. ``body`` is decoded JSON, or text where it is not JSON."""
    found = body.get("error") if isinstance(body, Mapping) else None
    error: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
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
    """``Retry-After`` in seconds. The form with a date is not used here."""
    return float(text) if text is not None and text.isascii() and text.isdecimal() else None
