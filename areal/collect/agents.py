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


Agent = Callable[[Example, Access], Said]  # raises EpisodeFailed, and ends within the access's timeout

_GRACE_S = 0.5  # for an async agent to end after its deadline


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
        try:
            return _answer(document, tokens=access.tokens)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EpisodeFailed(Kind.REFUSED, f"{access.base_url} answered no completion: {error!r}") from error

    return ask


def _answer(document: Any, *, tokens: bool) -> Said:
    choice = document["choices"][0]
    ids = {"prompt_ids": document.get("prompt_token_ids") or [], "completion_ids": choice.get("token_ids") or []}
    return Said(choice["message"].get("content") or "", tokens=ids if tokens else {})


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

    def call(example: Example, access: Access) -> Said:
        function: Any = found() if inspect.isclass(found) else found
        function = getattr(function, "run", function)
        given = {"base_url": access.base_url, "api_key": access.api_key, "model": access.model}
        returned = call_with(function, dict(example.fields), given=given)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_within(returned, access.timeout_s))
        return _said(returned)

    return lambda example, access: _run_within(
        lambda: call(example, access), f"episode-{example.number}", access.timeout_s
    )


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


def _run_within(work: Callable[[], Said], name: str, timeout_s: float) -> Said:
    """On a thread of its own, since nothing can stop a call from without: one that does not end in time is left behind,
    and the caller ends its session, so that what it still asks for is refused."""
    outcome: list[Said | BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - the boundary to user code: its failure is data
            outcome.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(timeout_s + _GRACE_S)
    if not outcome:
        raise EpisodeFailed(Kind.TIMEOUT, f"the agent did not end within {timeout_s:g} s")
    found = outcome[0]
    if isinstance(found, Said):
        return found
    raise found if isinstance(found, EpisodeFailed) else _blamed(found, timeout_s) from found


def _blamed(error: BaseException, timeout_s: float) -> EpisodeFailed:
    """Whose failure an agent's exception is. The clients that people use say when it was the service."""
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, TimeoutError):
        return EpisodeFailed(Kind.TIMEOUT, f"the agent did not end within {timeout_s:g} s")
    if type(error).__module__.partition(".")[0] in ("openai", "anthropic"):
        status = getattr(error, "status_code", None)
        if isinstance(status, int):
            return EpisodeFailed(refusal(status, {}).kind, said, status)
        if type(error).__name__ in ("APIConnectionError", "APITimeoutError"):
            return EpisodeFailed(Kind.UNREACHABLE, said)
    return EpisodeFailed(Kind.AGENT, said)
