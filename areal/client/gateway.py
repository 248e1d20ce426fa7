"""Calls to the JSON routes of a gateway, for people: each failure is an ArealError with the gateway's message and the
next step. Sessions of agents and of the recorder, page by page. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from areal.errors import ArealError, Conflict, NotFound, UsageFault

_DEADLINE_S = 10.0
_SESSIONS_A_PAGE = 200  # a data proxy builds a page in one step, and its other requests wait


class KeyRefused(ArealError):
    """The gateway rejects the key (401 or 403)."""


class GatewayClient(NamedTuple):
    url: str
    key: str | None
    timeout_s: float = _DEADLINE_S

    def get(self, path: str) -> Any:
        """Send GET and return the JSON document. Raises ArealError for an error status or without a response."""
        return self.checked("GET", path, *self.ask("GET", path))

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send a request and return (status, document), also for an error status. Raises ArealError without a
        response."""
        from areal.client.http import AdminClient

        try:
            return AdminClient(self.url, self.key or "", timeout_s=self.timeout_s).call(method, path, body)
        except OSError as error:
            raise ArealError(
                f"cannot reach the gateway {self.url}: {error or type(error).__name__}",
                hint="check --gateway (or AREAL_GATEWAY, or `areal config get-contexts`)",
            ) from error

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


def _reason(document: Any) -> str | None:
    if isinstance(document, dict):
        error = document.get("error", document)
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return None


# Sessions


def session_pages(
    chosen: GatewayClient, path: str, after: str | None = "", *, away: Callable[[int], None] = lambda count: None
) -> Iterator[Any]:
    """Yield all sessions of the list at ``path`` behind ``after``, page by page. ``away`` is called with the number of
    data proxies that are away, whose sessions are not listed."""
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
    """Call a route of an agent's session. Raises NotFound, Conflict, UsageFault, and ArealError with the gateway's
    message."""
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
    """Read a recorded session of an inference service, with ``rows`` also the training rows of its trajectories.
    Raises NotFound."""
    status, document = chosen.ask("GET", f"/rl/sessions/{quote(session, safe='')}" + ("?rows=true" if rows else ""))
    if status == 404:
        raise NotFound(f"{chosen.url} has no session {session}", hint="areal inf sessions list")
    return dict(chosen.checked("GET", "/rl/sessions/...", status, document))
