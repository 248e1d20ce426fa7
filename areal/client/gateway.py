"""The synchronous HTTP client of commands: JSON calls to services, and sessions of agents and of the recorder, page by
page. Standard library only, and ``http.client`` is imported by the first call.

Proxy variables are ignored, redirects are not followed, each call has its own connection, and a timeout applies to the
connect and to each read. Each failure is an ArealError: NoResponse, or what the caller makes of a status.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote, urlsplit

from areal.dataclasses import dataclass, field
from areal.errors import ArealError, Conflict, NotFound, UsageFault
from areal.files import parse_json

if TYPE_CHECKING:
    from http.client import HTTPResponse

_SESSIONS_A_PAGE = 200  # a data proxy builds a page in one step, and its other requests wait


class NoResponse(ArealError):
    """A call without a whole response. ``why``: refused, cut off, not HTTP. ``is_late``: silent for the timeout."""

    def __init__(self, message: str, why: str, hint: str | None, *, is_late: bool) -> None:
        super().__init__(f"{message}: {why}", hint=hint)
        self.why = why
        self.is_late = is_late


@dataclass(frozen=True)
class ServiceClient:
    """Client of a service. ``timeout_s`` bounds the connect and each read."""

    url: str
    key: str | None = field(default=None, repr=False)
    timeout_s: float = 5.0
    _what: ClassVar[str] = ""
    _hint: ClassVar[str | None] = None

    @contextlib.contextmanager
    def open(self, method: str, path: str, body: Any = None) -> Iterator[HTTPResponse]:
        """Yield the response, whatever its status. Leaving the context closes the connection, which ends a generation.
        Raises NoResponse, also for a failure in the context to read on."""
        import http.client

        parts = urlsplit(self.url)
        connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = connect(parts.hostname or "127.0.0.1", parts.port, timeout=self.timeout_s)
        headers = {"Accept": "application/json, text/event-stream"}
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            connection.request(method, parts.path.rstrip("/") + path, data, headers)
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            why, is_late = str(error).strip() or type(error).__name__, isinstance(error, TimeoutError)
            raise NoResponse(f"cannot reach {self._what}{self.url}", why, self._hint, is_late=is_late) from error
        finally:
            connection.close()

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the status, and the decoded JSON or, if the body is not JSON, its text. Raises NoResponse."""
        with self.open(method, path, body) as response:
            raw = response.read()
        try:
            return response.status, parse_json(raw)
        except ValueError:
            return response.status, raw.decode("utf-8", "replace")


class KeyRefused(ArealError):
    """The gateway rejects the key (401 or 403)."""


@dataclass(frozen=True)
class GatewayClient(ServiceClient):
    """Client of a gateway, for people: each failure has the gateway's message and the next step."""

    timeout_s: float = 10.0
    _what: ClassVar[str] = "the gateway "
    _hint: ClassVar[str | None] = "check --gateway (or AREAL_GATEWAY, or `areal config get-contexts`)"

    def get(self, path: str) -> Any:
        """Send GET and return the JSON document. Raises ArealError for an error status or without a response."""
        return self.checked("GET", path, *self.ask("GET", path))

    def checked(self, method: str, path: str, status: int, document: Any) -> Any:
        """Return the document of a 2xx response. Raises KeyRefused for 401 and 403, ArealError for other statuses."""
        if status in (401, 403):
            raise KeyRefused(
                f"the gateway {self.url} refuses the key ({method} {path} answers {status})",
                hint="give its key with --api-key-file or AREAL_API_KEY",
            )
        if not 200 <= status < 300:
            raise ArealError(f"the gateway {self.url} answers {status} to {method} {path}", detail=_reason(document))
        return document


def error_message(document: Any) -> str | None:
    """Return the message of a service's error response; None for another document."""
    error = document.get("error") if isinstance(document, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else None


def _reason(document: Any) -> str | None:
    if isinstance(document, dict):
        error = document.get("error", document)
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return None


def session_pages(
    chosen: GatewayClient, path: str, after: str | None = "", *, away: Callable[[int], None] = lambda count: None
) -> Iterator[Any]:
    """Yield the sessions of the list at ``path`` behind ``after``. ``away`` gets the number of data proxies away."""
    while after is not None:
        page = chosen.get(f"{path}?limit={_SESSIONS_A_PAGE}" + (f"&after={quote(after, safe='')}" if after else ""))
        yield from page["sessions"]
        after = page["next"]
        if after is None and page.get("journals_away"):
            away(len(page["journals_away"]))


def checked_session_key(key: str) -> str:
    from areal.wire.agents import KEY_PROBLEM, is_session_key

    if not is_session_key(key):
        raise UsageFault(f"the key of a session {KEY_PROBLEM}, not {key!r}")
    return key


def session_path(key: str, verb: str = "") -> str:
    """Return the path of an agent's session. Raises UsageFault for a text that is not a session's key."""
    return f"/sessions/{quote(checked_session_key(key), safe='')}{verb}"


def call_session(chosen: GatewayClient, method: str, key: str, verb: str = "", body: Any = None) -> Any:
    """Call a route of an agent's session. Raises NotFound, Conflict, UsageFault, ArealError with its message."""
    status, document = chosen.ask(method, session_path(key, verb), body)
    error = document.get("error") if isinstance(document, Mapping) else None
    if status < 400 or status in (401, 403) or not isinstance(error, Mapping):
        return dict(chosen.checked(method, f"/sessions/...{verb}", status, document))
    if error.get("code") in ("session_not_found", "session_ended"):
        raise NotFound(f"session {key}: {error.get('message')}", hint="areal agent sessions list")
    fault = Conflict if status in (409, 422, 425) else UsageFault if status == 400 else ArealError
    raise fault(str(error.get("message")), detail=f"request {error.get('request_id')}")


def content_text(content: Any) -> str:
    """Return the text of a message of a turn; a part without text is returned unchanged."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)


def close_session(chosen: GatewayClient, key: str) -> None:
    chosen.checked("POST", "/sessions/close", *chosen.ask("POST", "/sessions/close", {"session_key": key}))


def read_session(chosen: GatewayClient, session: str, *, rows: bool = False) -> dict[str, Any]:
    """Read a recorded session of an inference service, with ``rows`` also its training rows. Raises NotFound."""
    status, document = chosen.ask("GET", f"/rl/sessions/{quote(session, safe='')}" + ("?rows=true" if rows else ""))
    if status == 404:
        raise NotFound(f"{chosen.url} has no session {session}", hint="areal inf sessions list")
    return dict(chosen.checked("GET", "/rl/sessions/...", status, document))
