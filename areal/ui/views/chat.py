"""``/chat``: a playground of the served models. A GET lists them; a POST with messages is one whole answer.

The call is made here with the service's own key, which never reaches the page. It opens no session and is not recorded.
"""

from __future__ import annotations

import time
from typing import Any

from areal.client.http import AdminClient, ChatClient
from areal.errors import ArealError, NotFound, UsageFault
from areal.reconcilers.home_view import HomeView
from areal.reconcilers.usage import service_key
from areal.resources.kinds import INFERENCE_SERVICE, Ref, check_name
from areal.ui.context import ViewContext

_LIST_S = 2.0
_ANSWER_S = 300.0
_MOST_TOKENS = 4096


def read(view: ViewContext) -> dict[str, Any]:
    return _models(view) if view.body is None else _answer(view)


def _models(view: ViewContext) -> dict[str, Any]:
    """The models of all services that run, by their served names."""
    home, found, unseen = HomeView(view.home), [], []
    for item in home.of_kind(INFERENCE_SERVICE):
        address = home.address(item.ref)
        if not address:
            continue
        try:
            key = service_key(view.home, item.name)
            status, document = AdminClient(address, key, timeout_s=_LIST_S).get("/v1/models")
            if status != 200 or not isinstance(document, dict) or "data" not in document:
                raise ArealError(f"GET {address}/v1/models answers {status} without models")
            found += [{"service": item.name, "model": each["id"]} for each in document["data"]]
        except (ArealError, OSError) as error:
            unseen.append(f"{item.ref}: its models are not known: {error}")
    return {"models": found, "unseen": unseen}


def _answer(view: ViewContext) -> dict[str, Any]:
    asked = view.body
    if not isinstance(asked, dict):
        raise UsageFault("the body is not an object")
    messages, model = asked.get("messages"), asked.get("model")
    if not isinstance(messages, list) or not messages or not isinstance(model, str):
        raise UsageFault("model and messages are needed")
    ref = Ref(INFERENCE_SERVICE, check_name(str(asked.get("service", ""))))
    address = HomeView(view.home).address(ref)
    if not address:
        raise NotFound(f"{ref} does not run", hint=f"areal describe {ref.kind.lower()}/{ref.name}")
    client = ChatClient(address, service_key(view.home, ref.name), timeout_s=_ANSWER_S)
    most = _number(asked, "maxTokens", 1, _MOST_TOKENS)
    began = time.monotonic()
    answer = client.complete(
        messages,
        model=model,
        temperature=_number(asked, "temperature", 0.0, 2.0),
        top_p=_number(asked, "topP", 0.0, 1.0),
        max_tokens=int(most) if most is not None else None,
        logprobs=True,
    )
    return {
        "text": answer.text,
        "tokens": [{"text": each.token, "logprob": each.logprob} for each in answer.logprobs],
        "finishReason": answer.finish_reason,
        "usage": dict(answer.usage or {}),
        "seconds": round(time.monotonic() - began, 3),
    }


def _number(asked: dict[str, Any], name: str, least: float, most: float) -> float | None:
    value = asked.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise UsageFault(f"{name} is not a number from {least:g} to {most:g}")
    return float(value)
