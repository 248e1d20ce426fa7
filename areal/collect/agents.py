"""What runs in an episode: an agent that talks to an OpenAI-compatible address, ours or the user's.

A user's agent is a function, or a class with ``run``, plain or ``async``::

    def agent(example, *, base_url, api_key, model): ...

It is called with the example's fields and those of the keywords that it takes; a class is instantiated once an episode.
It may return the text of its final answer (for ``--reward``), a reward, or rewards by interaction id.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal.client.admin import AdminClient
from areal.collect.dataset import Example
from areal.collect.failures import EpisodeFailed, Kind
from areal.collect.loading import call_with, load_named


@dataclass(frozen=True)
class Access:
    """The session that an agent talks to. ``base_url`` ends in ``/v1``, as OpenAI's SDK wants it.
    ``tokens``: whether the reward wants the answer's token ids."""

    base_url: str
    api_key: str = field(repr=False)
    model: str = ""
    timeout_s: float = 600.0
    tokens: bool = False


@dataclass(frozen=True)
class Said:
    """What an agent returned. ``rewards`` by interaction id; the empty id is the last interaction. ``tokens``: ids of
    prompt and answer, where they were asked for."""

    answer: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)


Agent = Callable[[Example, Access], Said]


def single_turn(sampling: Mapping[str, Any]) -> Agent:
    """One answer to the example's messages."""

    def ask(example: Example, access: Access) -> Said:
        client = AdminClient(access.base_url, access.api_key, timeout_s=access.timeout_s)
        body = {"model": access.model, "messages": list(example.messages), **sampling}
        if access.tokens:
            body["return_token_ids"] = True
        try:
            status, document = client.post("/chat/completions", body)
        except TimeoutError as error:
            raise EpisodeFailed(Kind.TIMEOUT, f"no answer within {access.timeout_s:g} s") from error
        except OSError as error:
            raise EpisodeFailed(Kind.UNREACHABLE, f"{access.base_url}: {error}") from error
        if status != 200:
            raise refusal(status, document)
        (choice,) = document["choices"]
        ids = {"prompt_ids": document.get("prompt_token_ids") or [], "completion_ids": choice.get("token_ids") or []}
        return Said(choice["message"].get("content") or "", tokens=ids if access.tokens else {})

    return ask


def refusal(status: int, document: Any) -> EpisodeFailed:
    """What a status means for an episode: the service's trouble and a session that is gone are worth another try, a
    refusal is not."""
    error = document.get("error") if isinstance(document, Mapping) else None
    error = error if isinstance(error, Mapping) else {"message": str(document)[:200]}
    if status >= 500 or status in (408, 425, 429):
        kind = Kind.UNREACHABLE
    elif status == 401 or error.get("code") in ("session_not_found", "session_ended"):
        kind = Kind.LOST
    else:
        kind = Kind.REFUSED
    return EpisodeFailed(kind, f"{status}: {error.get('message')}", status)


def named_agent(text: str) -> Agent:
    """Raises ArealError when there is no such code. It is looked up once, here."""
    found = load_named(text, "--workflow")

    def run(example: Example, access: Access) -> Said:
        function: Any = found() if inspect.isclass(found) else found
        function = getattr(function, "run", function)
        given = {"base_url": access.base_url, "api_key": access.api_key, "model": access.model}
        returned = call_with(function, dict(example.fields), given=given)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_within(returned, access.timeout_s))
        return _said(returned)

    return run


async def _within(awaitable: Any, timeout_s: float) -> Any:
    return await asyncio.wait_for(awaitable, timeout_s)


def _said(returned: Any) -> Said:
    if returned is None:
        return Said()
    if isinstance(returned, str):
        return Said(returned)
    if isinstance(returned, Mapping):
        return Said(rewards={str(name): _number(value) for name, value in returned.items()})
    return Said(rewards={"": _number(returned)})


def _number(value: Any) -> float:
    """Numbers of any library, but no truth values by accident: True is 1."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        message = f"the agent returned {type(value).__name__}, which is no text, reward, or rewards by interaction id"
        raise EpisodeFailed(Kind.AGENT, message) from error


def run_within(agent: Agent, example: Example, access: Access) -> Said:
    """Run it on a thread of its own, at most ``access.timeout_s``; one that does not end is left behind: its session is
    ended by the caller, so that what it still asks for is refused. Raises EpisodeFailed."""
    outcome: list[Said | BaseException] = []

    def work() -> None:
        try:
            outcome.append(agent(example, access))
        except BaseException as error:  # noqa: BLE001 - the boundary to user code: its failure is data
            outcome.append(error)

    thread = threading.Thread(target=work, name=f"episode-{example.number}", daemon=True)
    thread.start()
    thread.join(access.timeout_s + 0.5)
    if not outcome:
        raise EpisodeFailed(Kind.TIMEOUT, f"the agent did not end within {access.timeout_s:g} s")
    found = outcome[0]
    if isinstance(found, Said):
        return found
    if isinstance(found, EpisodeFailed):
        raise found
    if isinstance(found, TimeoutError):
        raise EpisodeFailed(Kind.TIMEOUT, f"the agent did not end within {access.timeout_s:g} s") from found
    raise EpisodeFailed(Kind.AGENT, f"{type(found).__name__}: {found}") from found
