"""``/agents/NAME[/session/S]``: the sessions of an agent service, their turns, tool calls and results; ``/sessions``:
those that an inference service has recorded, with their tokens. From the gateways, as ``areal agent sessions`` and
``areal inf sessions`` ask them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from areal.client.gateway import GatewayClient, call_session, content_text, read_session, session_pages
from areal.dataclasses import replace
from areal.errors import ArealError, UsageFault
from areal.reconcilers.home_view import HomeView
from areal.resources.kinds import AGENT_SERVICE, INFERENCE_SERVICE, Ref, resolve_kind
from areal.state.objects import ObjectStore
from areal.trajectories.record import episodes_of_export
from areal.trajectories.view import shown_episode
from areal.ui.jobs import decoder_named
from areal.ui.samples import find_trained
from areal.ui.views import REMOTE, SERVICES, Marks, ViewContext, explained, gateway_of, period

if TYPE_CHECKING:
    from areal.wire.agents import TurnRecord

_CALL_S = 10.0
_ROWS = 300  # sessions of an answer
_MOST_READ = 6000  # of the gateway, to find them
_TURNS = 50
_TEXT = 20_000  # characters of a message, of a tool's arguments or result
_PERIOD_S = 3
_TOKENS = 60_000


def read(view: ViewContext) -> dict[str, Any]:
    """Without ``name`` the services; with it a page of sessions; with ``session`` a page of its turns, with ``tokens``
    its tokens, and with ``trained`` the samples that jobs trained on."""
    if not view.query.get("name"):
        return {"services": _services(view)}
    ref = Ref(resolve_kind(view.query.get("kind") or AGENT_SERVICE), view.name())
    if ref.kind not in SERVICES:
        raise UsageFault(f"{ref.kind} has no sessions")
    session = view.query.get("session")
    try:
        client = gateway_of(view, ref, _CALL_S)
        if not session:
            return _page(view, ref, client)
        if ref.kind == AGENT_SERVICE:
            return _agent_session(view, ref, client, session)
        return _tokens(view, client, session) if view.query.get("tokens") else _recorded(view, client, session)
    except ArealError as error:
        raise explained(view, ref, error) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArealError(f"{ref} does not answer as a gateway of areal does: {error!r}") from error


def marks(view: ViewContext) -> Marks:
    return {"look": period(_PERIOD_S)}


def _services(view: ViewContext) -> list[dict[str, object]]:
    if view.remote is not None:
        client = replace(view.remote.client, timeout_s=_CALL_S)
        kind = AGENT_SERVICE if client.ask("GET", "/v1/models")[0] == 404 else INFERENCE_SERVICE
        return [{"ref": f"{kind}/{REMOTE}", "kind": kind, "name": REMOTE, "address": client.url, "message": ""}]
    home = HomeView(view.home)
    items = [item for kind in SERVICES for item in home.of_kind(kind)]
    seen = home.statuses(items)
    return [
        {
            "ref": str(item.ref),
            "kind": item.kind,
            "name": item.name,
            "phase": str(seen[str(item.ref)].phase),
            "address": home.address(item.ref),
            "message": seen[str(item.ref)].message,
        }
        for item in items
    ]


def _page(view: ViewContext, ref: Ref, client: GatewayClient) -> dict[str, object]:
    """Sessions behind ``after`` that have the words of ``q``, and where to go on."""
    of_agent, words = ref.kind == AGENT_SERVICE, view.query.get("q", "").lower().split()
    away: list[int] = []
    path = "/sessions" if of_agent else "/rl/sessions"
    found: list[dict[str, object]] = []
    last, count = "", 0
    pages = session_pages(client, path, view.query.get("after", ""), away=away.append)
    for each in islice(pages, _MOST_READ):
        row = _agent_row(each) if of_agent else _recorded_row(each)
        last, count = row["id"], count + 1
        if all(word in " ".join(map(str, row.values())).lower() for word in words):
            found.append(row)
            if len(found) == _ROWS:
                break
    whole = next(pages, None) is None
    return {"sessions": found, "read": count, "next": None if whole else last, "away": sum(away)}


def _agent_row(session: Mapping[str, object]) -> dict[str, Any]:
    names = ("state", "created", "used", "turns", "waiting", "metadata")
    row = {"id": str(session["session_key"]), **{name: session.get(name) for name in names}}
    return {**row, "recorded": session.get("inference_session_id")}


def _recorded_row(session: Mapping[str, object]) -> dict[str, Any]:
    return {
        "id": str(session["session_id"]),
        "state": session.get("state"),
        "created": session.get("created"),
        "turns": session.get("interaction_count"),
        "reward": session.get("reward"),
        "ready": session.get("ready"),
        "task": session.get("task_id"),
        "group": session.get("group_id"),
    }


def _agent_session(view: ViewContext, ref: Ref, client: GatewayClient, session: str) -> dict[str, object]:
    document = call_session(client, "GET", session)
    words = view.query.get("q", "").lower().split()
    turns = [_turn(number, each) for number, each in enumerate(document["recorded_turns"], 1)]
    chosen = [each for each in turns if all(word in _text_of(each) for word in words)]
    before = view.number("before", len(turns) + 1, least=1)
    shown = [each for each in chosen if each["number"] < before][-_TURNS:]
    row = _agent_row(document)
    found: dict[str, object] = {
        "session": row,
        "turns": shown,
        "count": len(turns),
        "matching": len(chosen),
        "older": bool(shown) and shown[0]["number"] > chosen[0]["number"],
        "recordedBy": None,
        "calls": [],
        "unseen": "",
    }
    if row["recorded"] is None:
        return found
    if view.remote is None:
        stored = ObjectStore(view.home).expect(ref)
        service = str((stored.spec.get("inference") or {}).get("service") or "default")
        found["recordedBy"] = service
        try:
            recorder = gateway_of(view, Ref(INFERENCE_SERVICE, service), _CALL_S)
            found["calls"] = _calls(read_session(recorder, row["recorded"]))
        except ArealError as error:
            found["unseen"] = f"its model calls are not known: {error.message}"
        if view.query.get("trained"):
            found["trained"] = find_trained(view.home, row["recorded"], float(row["created"] or 0.0))
    return found


def _turn(number: int, turn: TurnRecord) -> dict[str, Any]:
    return {
        "number": number,
        "at": turn["at"],
        "seconds": turn["seconds"],
        "outcome": turn["outcome"],
        "error": turn["error"],
        "messages": [_message(each) for each in turn["messages"]],
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [each.get("function") or {} for each in message.get("tool_calls") or ()]
    return {
        "role": str(message.get("role")),
        **_cut(content_text(message.get("content"))),
        "calls": [{"name": str(each.get("name")), **_cut(str(each.get("arguments") or ""))} for each in calls],
    }


def _cut(text: str) -> dict[str, object]:
    return {"text": text[:_TEXT], "cut": max(0, len(text) - _TEXT)}


def _text_of(turn: Mapping[str, Any]) -> str:
    parts = [turn["outcome"], turn["error"], *(each["text"] for each in turn["messages"])]
    parts += [f"{call['name']} {call['text']}" for each in turn["messages"] for call in each["calls"]]
    return " ".join(str(part) for part in parts if part).lower()


def _calls(document: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return the recorded model calls of a session, with the state of their trajectory."""
    return [
        {
            "id": call.get("interaction_id"),
            "trajectory": each.get("trajectory_id"),
            "state": each.get("state"),
            "finish": call.get("finish_reason"),
            "prompt": call.get("prompt_tokens"),
            "tokens": call.get("output_tokens"),
            "reward": call.get("reward"),
            "at": call.get("at"),
        }
        for each in document["trajectories"]
        for call in each["interactions"]
    ]


def _recorded(view: ViewContext, client: GatewayClient, session: str) -> dict[str, object]:
    document = read_session(client, session)
    found: dict[str, object] = {"session": _recorded_row(document), "calls": _calls(document)}
    found["failures"] = [
        {"trajectory": each.get("trajectory_id"), "codes": each.get("failures"), "error": each.get("error")}
        for each in document["trajectories"]
        if each.get("failures") or each.get("error")
    ]
    if view.query.get("trained") and view.remote is None:
        found["trained"] = find_trained(view.home, session, float(document.get("created") or 0.0))
    return found


def _tokens(view: ViewContext, client: GatewayClient, session: str) -> dict[str, object]:
    """Return the trajectories of a session, token by token, up to ``_TOKENS``."""
    trajectories = [each for each in read_session(client, session, rows=True)["trajectories"] if each.get("rows")]
    shown: list[dict[str, object]] = []
    tokens = 0
    for each in trajectories:
        for episode in episodes_of_export(each):
            tokens += sum(len(row.input_ids) for row in episode.interactions)
            if shown and tokens > _TOKENS:
                return {"episodes": shown, "leftOut": len(trajectories) - len(shown)}
            model = episode.interactions[0].model if episode.interactions else ""
            decoder = decoder_named(view.home, model) if model and view.remote is None else None
            shown.append(shown_episode(episode, decoder))
    return {"episodes": shown, "leftOut": 0}
