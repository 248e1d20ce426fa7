"""The asyncio client of an agent service: sessions with an agent, their turns, rewards and exports.

A client holds one connection pool; create one and share it. Every call has a deadline (``timeout_s``, by default the
client's) and raises the errors of ``areal.client.errors``. A turn returns a response of OpenAI's Responses API, as a
plain dict. A session key is opaque.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from areal.client.errors import ClientError, ConnectionLost, DeadlineExceeded
from areal.client.inference import Style, rewarded_from_json
from areal.client.trajectories import Trajectories, from_json
from areal.client.transport import AsyncClient, HttpCall, events
from areal.dataclasses import dataclass, field
from areal.wire.agents import ExportSession, ModelAccess, RewardSession, SessionHistory, SessionSummary
from areal.wire.bodies import Rewarded
from areal.wire.fields import write_fields

RESPONSES = "/v1/responses"
_CANCEL_S = 2.0

Input = str | Sequence[Mapping[str, object]]
"""The input of a turn: text, or items of the Responses API."""


@dataclass(frozen=True)
class AsyncAgentSession:
    """One conversation with the agent. ``inference_session_id``: where its model calls are recorded."""

    client: AsyncAgentClient = field(repr=False)
    key: str
    inference_session_id: str | None = None

    async def respond(
        self, /, input: Input, *, idempotency_key: str | None = None, timeout_s: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Run one turn and return the whole response. The request carries an ``Idempotency-Key``, a new one unless you
        set it, so that it is sent again if there is no response, and run once. A cancelled call cancels its turn. So
        does a call without a response within its deadline, unless you set the key: then the turn continues for another
        call with the same key. The cancellation takes up to 2 s more if the service does not answer."""
        key = idempotency_key or uuid4().hex
        headers = {"Idempotency-Key": key}
        call = HttpCall("POST", RESPONSES, self._body(input, fields), None, headers, timeout_s, repeatable=True)
        try:
            answer: dict[str, Any] = (await self.client.transport.call(call)).json()
        except (asyncio.CancelledError, ConnectionLost, DeadlineExceeded) as error:
            if idempotency_key is None or isinstance(error, asyncio.CancelledError):
                with contextlib.suppress(ClientError):
                    await self.cancel(idempotency_key=key, timeout_s=_CANCEL_S)
            raise
        return answer

    @contextlib.asynccontextmanager
    async def stream(
        self, input: Input, *, timeout_s: float | None = None, **fields: Any
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Yield the events of a turn. Leaving the context cancels it. ``timeout_s`` limits the time between events."""
        call = HttpCall("POST", RESPONSES, self._body(input, {**fields, "stream": True}), timeout_s=timeout_s)
        silence_s = self.client.timeout_s if timeout_s is None else timeout_s
        async with self.client.transport.stream(call) as response:
            yield events(response, f"POST {self.client.base_url}{RESPONSES}", silence_s)

    def _body(self, input: Input, fields: Mapping[str, object]) -> dict[str, object]:
        """Return the request body. It carries the session key, which may have characters that a header cannot have."""
        given = {name: value for name, value in fields.items() if value is not None}
        return {"input": input if isinstance(input, str) else list(input), "user": self.key, **given}

    async def show(self) -> SessionHistory:
        """Return the session's state, its turns, and its history as OpenAI chat messages."""
        return await self._call("GET", "")

    async def cancel(self, *, idempotency_key: str | None = None, timeout_s: float | None = None) -> bool:
        """Cancel the running turn; with ``idempotency_key``, that call's message. False if there was nothing."""
        query = f"?idempotency_key={_segment(idempotency_key)}" if idempotency_key is not None else ""
        return bool((await self._call("DELETE", f"/turn{query}", timeout_s=timeout_s))["cancelled"])

    async def reward(self, value: float, interaction_id: str | None = None) -> Rewarded:
        """Reward the session's last model call, which seals its trajectory, or the interaction with the given id."""
        body = write_fields(RewardSession(reward=value, interaction_id=interaction_id))
        return rewarded_from_json(await self._call("POST", "/reward", body))

    async def export(
        self,
        *,
        trajectory_id: int | None = None,
        discount: float = 1.0,
        style: Style = "individual",
        reward: float | None = None,
        timeout_s: float | None = None,
    ) -> Trajectories:
        """Return the training rows of the session's model calls, for each trajectory that is ready. The same request
        returns the same rows, until another trajectory is ready or the export is acknowledged. ``reward``: the reward
        of the last call, set first, in the same request. Raises NotReady, UnknownName."""
        export = ExportSession(trajectory_id=trajectory_id, discount=discount, style=style, reward=reward)
        body = write_fields(export)
        return from_json(await self._call("POST", "/export", body, timeout_s=timeout_s))

    async def acknowledge(self, export: Trajectories | str) -> None:
        """Acknowledge an export that the caller has stored. The service may then delete it."""
        export_id = export if isinstance(export, str) else export.export_id
        await self._call("POST", "/export/ack", {"export_id": export_id})

    async def close(self) -> None:
        """Close the session. A running turn is cancelled."""
        body = {"session_key": self.key}
        await self.client.transport.call(HttpCall("POST", "/sessions/close", body, repeatable=True))

    async def _call(self, method: str, verb: str, body: Any = None, timeout_s: float | None = None) -> Any:
        path = f"/sessions/{_segment(self.key)}{verb}"
        return await self.client.transport.json(method, path, body, timeout_s=timeout_s, repeatable=True)


class AsyncAgentClient(AsyncClient):
    """Client of an agent service. ``base_url``: its gateway's, without ``/v1``. Use ``async with``, or close it."""

    async def start_session(
        self,
        key: str | None = None,
        *,
        metadata: Mapping[str, object] | None = None,
        inference: ModelAccess | None = None,
    ) -> AsyncAgentSession:
        """Open a session, with a new key if none is given. ``inference``: an RL session that the caller has started at
        an inference service of the agent service. Without it, the service starts one if it has an inference service."""
        body: dict[str, Any] = {"session_key": key, "metadata": dict(metadata or {})}
        if inference is not None:
            body |= {"inf_base_url": inference.base_url, "session_api_key": inference.api_key}
            body |= {"inf_model": inference.model}
        given = {name: value for name, value in body.items() if value not in (None, {})}
        answer = await self.transport.json("POST", "/sessions", given, repeatable=key is not None)
        return AsyncAgentSession(self, answer["session_key"], answer.get("inference_session_id"))

    def session(self, key: str) -> AsyncAgentSession:
        """Return a session by its key, without a request. If it does not exist, its first turn opens it."""
        return AsyncAgentSession(self, key)

    async def sessions(self, page: int = 1000) -> AsyncIterator[SessionSummary]:
        """Yield every session with its key, without its history."""
        async for session in self.transport.sessions("/sessions", page):
            yield session


def response_text(response: Mapping[str, Any]) -> str:
    """Return the text of a response's messages."""
    messages = (item for item in response["output"] if item["type"] == "message")
    return "".join(part.get("text", "") for item in messages for part in item["content"])


def _segment(key: str) -> str:
    return quote(key, safe="")
