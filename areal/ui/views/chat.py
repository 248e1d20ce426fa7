"""``/chat``: a playground of the served models. A GET lists them; a POST with messages is one answer, in parts.

The call is made here with the service's own key, which never reaches the page. Where replicas of a model serve several
versions, each version is a choice: such a call goes to a replica with it. An answer is recorded only in a session,
which is a change: it needs ``--allow-actions``. Keys of sessions stay here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from areal.client.gateway import GatewayClient
from areal.client.http import ChatClient, ChatDelta
from areal.dataclasses import replace
from areal.errors import ArealError, Conflict, NotFound, UsageFault
from areal.resources.kinds import INFERENCE_SERVICE, Ref, check_name
from areal.ui.views import ViewContext, ask_all, entries, gateway_of

_LIST_S = 2.0
_ANSWER_S = 300.0
_SESSION_S = 60.0
_MOST_TOKENS = 4096
_MOST_SESSIONS = 1000
_keys: dict[tuple[str, str], str] = {}  # (address of the gateway, session) -> key


def read(view: ViewContext) -> dict[str, Any] | Iterator[dict[str, Any]]:
    return models(view) if view.body is None else answer(view)


def models(view: ViewContext) -> dict[str, Any]:
    """Return the models of all services that run, by served names, with the versions of their replicas."""
    asked = ask_all(view, INFERENCE_SERVICE, lambda ref, client: _choices(ref.name, client), _LIST_S)
    return {
        "models": [each for item in asked for each in item.answer or ()],
        "unseen": [f"{item.ref}: its models are not known: {item.why}" for item in asked if item.why],
        "keeps": view.actions is not None,
    }


def _choices(service: str, client: GatewayClient) -> list[dict[str, object]]:
    names = [str(each["id"]) for each in entries(client, "/v1/models", "data", "models")]
    try:
        workers = entries(client, "/workers", "workers", "replicas")
    except ArealError:  # a key for calls alone
        workers = []
    found: list[dict[str, object]] = []
    for name in names:
        found.append({"service": service, "model": name, "version": None})
        serving = [each for each in workers if each.get("model") == name and each.get("state") == "ready"]
        versions = sorted({each["version"] for each in serving if isinstance(each.get("version"), int)})
        if len(versions) > 1:
            found += [{"service": service, "model": name, "version": version} for version in versions]
    return found


def answer(view: ViewContext) -> Iterator[dict[str, Any]]:
    """Parts with ``text`` and ``tokens``, at last ``finishReason``; recorded with ``keep``, in ``session`` or anew."""
    asked = view.body
    if not isinstance(asked, dict):
        raise UsageFault("the body is not an object")
    messages, model, session = asked.get("messages"), asked.get("model"), asked.get("session")
    if not isinstance(messages, list) or not messages or not isinstance(model, str):
        raise UsageFault("model and messages are needed")
    client = gateway_of(view, Ref(INFERENCE_SERVICE, check_name(str(asked.get("service", "")))), _ANSWER_S)
    most = _number(asked, "maxTokens", 1, _MOST_TOKENS)
    fields = {
        "temperature": _number(asked, "temperature", 0.0, 2.0),
        "top_p": _number(asked, "topP", 0.0, 1.0),
        "max_tokens": int(most) if most is not None else None,
        "logprobs": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    url, key = client.url, client.key
    if (version := asked.get("version")) is not None:
        url = _replica(client, model, version)
    if asked.get("keep"):
        if view.actions is None:
            raise UsageFault("a session is kept by `areal ui --allow-actions` only")
        if version is not None:
            raise UsageFault("an answer of one version is not recorded: its session may be of another replica")
        session, key = _session(client, model, session)
    return _parts(ChatClient(url, key, timeout_s=_ANSWER_S), messages, model, fields, session)


def _parts(
    client: ChatClient, messages: list[Any], model: str, fields: dict[str, Any], session: str | None
) -> Iterator[dict[str, Any]]:
    began, first = time.monotonic(), None
    usage: dict[str, int] = {}
    finish = None
    try:
        with client.stream(messages, model=model, **fields) as deltas:
            for delta in deltas:
                if first is None and delta.text:
                    first = time.monotonic() - began
                usage, finish = dict(delta.usage or usage), delta.finish_reason or finish
                if delta.text or delta.logprobs:
                    yield _part(delta)
    except (ValueError, KeyError, TypeError) as error:
        raise ArealError(f"the answer cannot be read: {error!r}") from error
    yield {
        "finishReason": finish,
        "usage": usage,
        "session": session,
        "seconds": round(time.monotonic() - began, 3),
        "firstSeconds": first and round(first, 3),
    }


def _part(delta: ChatDelta) -> dict[str, object]:
    known = len(delta.versions) == len(delta.logprobs)
    versions = delta.versions if known else (None,) * len(delta.logprobs)
    return {
        "text": delta.text,
        "tokens": [
            {"text": each.token, "logprob": each.logprob, "version": version}
            for each, version in zip(delta.logprobs, versions, strict=True)
        ],
    }


def _replica(client: GatewayClient, model: str, version: Any) -> str:
    """Return the address of a replica that serves the version now. Raises NotFound."""
    for each in entries(client, "/workers", "workers", "replicas"):
        if each.get("model") == model and each.get("state") == "ready" and each.get("version") == version:
            return str(each["worker_addr"])
    raise NotFound(f"no replica of {model} serves version {version} any more", hint="choose another version")


def _session(client: GatewayClient, model: str, session: Any) -> tuple[str, str]:
    """Return the session that is named and its key, otherwise a new one. Raises NotFound for a session of another
    server."""
    if session is not None:
        key = _keys.get((client.url, str(session)))
        if key is None:
            raise NotFound(f"session {str(session)[:80]} is none of this page's", hint="n begins a new conversation")
        return str(session), key
    if len(_keys) >= _MOST_SESSIONS:
        raise Conflict(f"this server has kept {_MOST_SESSIONS} sessions", hint="start `areal ui` again")
    call = replace(client, timeout_s=_SESSION_S)
    body = {"task_id": "areal-ui", "model": model, "online": False}
    status, found = call.ask("POST", "/rl/start_session", body)
    (started,) = call.checked("POST", "/rl/start_session", status, found)["sessions"]
    _keys[client.url, started["session_id"]] = started["session_api_key"]
    return str(started["session_id"]), str(started["session_api_key"])


def _number(asked: dict[str, object], name: str, least: float, most: float) -> float | None:
    value = asked.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise UsageFault(f"{name} is not a number from {least:g} to {most:g}")
    return float(value)
