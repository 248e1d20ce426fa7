"""Find out what is adopted: an OpenAI-compatible server that answers, and the model that it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from areal.client.admin import AdminClient
from areal.errors import Conflict, NotFound, TargetFailed
from areal.runtime.ports import ports_of

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Server:
    """``model`` is the server's own name of what it serves."""

    url: str
    model: str


def find_server(pid: int | None, url: str | None, name: str) -> Server:
    """The server at ``url``, or on a port of process ``pid``, and its model: the one called ``name``, or its only one.

    Raises NotFound (no port), TargetFailed (no such server), Conflict (several models, none of this name).
    """
    urls = [url.rstrip("/")] if url is not None else _urls_of(pid or 0)
    problems = []
    for candidate in urls:
        models = _models(candidate)
        if isinstance(models, list):
            return Server(candidate, _choose(models, name, candidate))
        problems.append(models)
    raise TargetFailed(
        f"no OpenAI-compatible server: {'; '.join(problems)}", hint="it must answer GET /v1/models; check the address"
    )


def _urls_of(pid: int) -> list[str]:
    ports = ports_of(pid)
    if not ports:
        raise NotFound(f"process {pid} listens on no port", hint=f"ss -ltnp | grep pid={pid}")
    return [f"http://127.0.0.1:{port}" for port in ports]


def _models(url: str) -> list[str] | str:
    """The models that a server lists, or why it lists none."""
    where = f"{url}/models" if url.endswith("/v1") else f"{url}/v1/models"
    try:
        status, answer = AdminClient(url, timeout_s=_TIMEOUT_S).get(where.removeprefix(url))
    except OSError as error:
        return f"{where} does not answer ({error or type(error).__name__})"
    if status in (401, 403):
        return f"{where} wants a key ({status}): declare the model with external.apiKeyFrom instead"
    entries: Any = answer.get("data") if isinstance(answer, dict) else None
    if status != 200 or not isinstance(entries, list):
        return f"{where} answers {status} and lists no models"
    names = [str(entry["id"]) for entry in entries if isinstance(entry, dict) and entry.get("id")]
    return names or f"{where} lists no models"


def _choose(models: list[str], name: str, url: str) -> str:
    if name in models:
        return name
    if len(models) == 1:
        return models[0]
    raise Conflict(
        f"{url} serves {len(models)} models and none is called {name!r}: {', '.join(models)}",
        hint="--as model/NAME with one of them, or a manifest with external.model",
    )
