"""Episodes that an AgentService runs (``rollout.agents`` of a TrainJob).

The episode has a session at the inference service, as with any agent. The agent service gets that session's key and the
task, and runs its agent. Every call of the agent is therefore recorded in the episode's session, with the versions of
the weights, and the job admits, rejects and exports the episode like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from areal.client.agent import AsyncAgentClient, response_text
from areal.client.command import address_lookup, read_key_file
from areal.client.errors import ClientError, ServiceError
from areal.errors import UsageFault
from areal.rollout.rows import RowReward
from areal.rollout.sessions import CLEAN_UP_S
from areal.rollout.workflows import AGENTS_ADDRESS, AGENTS_KEY_FILE, AGENTS_RECORD, SessionWorkflow

if TYPE_CHECKING:
    from areal.client.inference import AsyncSession


class AgentEpisodeFailed(Exception):
    """The agent raised or returned an invalid answer. The workflow is to blame, and the episode has no reward."""


class AgentServiceWorkflow(SessionWorkflow):
    """Sends each row's ``prompt`` or ``messages`` to an agent service, with its other columns as metadata. ``address``
    and ``admin_api_key_file`` belong to the service's gateway; by default a TrainJob sets them in the environment.
    ``reward_fn`` rewards the answer; without it, ``metadata["reward"]`` of the agent is the reward."""

    def __init__(
        self,
        *,
        reward_fn: Any = None,
        reward_weights: list[float] | None = None,
        address: str | None = None,
        admin_api_key_file: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        record = "" if address else os.environ.get(AGENTS_RECORD, "")
        address = address or os.environ.get(AGENTS_ADDRESS)
        if not address:
            hint = (
                f"spec.rollout.agents of a TrainJob, or workflow_kwargs.address=http://HOST:PORT, or {AGENTS_ADDRESS}"
            )
            raise UsageFault("the address of the agent service is not given", hint=hint)
        key_file = admin_api_key_file or os.environ.get(AGENTS_KEY_FILE)
        key = read_key_file(key_file) if key_file else None
        self._client = AsyncAgentClient(address, key, lookup=address_lookup(record))
        self._reward = RowReward(reward_fn, weights=reward_weights) if reward_fn else None

    async def close(self) -> None:
        await self._client.close()

    async def run_session(self, session: AsyncSession, engine: Any, data: dict[str, object]) -> Any:
        task = data.get("messages") or data.get("prompt")
        if not task or not isinstance(task, Sequence):
            found = f"{type(task).__name__} {task!r:.40}" if task else ", ".join(data) or "nothing"
            raise UsageFault(f"a row needs messages (a list) or prompt (a text); this one has {found}")
        metadata = {name: value for name, value in data.items() if name not in ("messages", "prompt")}
        key = f"episode-{uuid4().hex}"
        access = {"inf_base_url": engine.base_url, "inf_model": engine.model, "session_api_key": session.api_key}
        try:
            answer = await self._client.session(key).respond(task, metadata=metadata, **access)
        except ClientError as error:
            if error.code == "agent_failed":
                raise AgentEpisodeFailed(str(error)) from None
            if error.code == "foreign_inference":  # the agent service follows a moved inference service with a delay
                raise ServiceError(str(error), status=error.status, code=error.code) from error
            raise
        finally:
            with contextlib.suppress(ClientError, TimeoutError):  # the session expires
                async with asyncio.timeout(CLEAN_UP_S):
                    await self._client.session(key).close()
        if self._reward is None:
            if "reward" not in answer["agent_metadata"]:
                hint = (
                    'reward_fn=module:function, or AgentResponse(metadata={"reward": 1.0}) (None rejects the episode)'
                )
                raise UsageFault("no reward is given for the agent's answer", hint=hint)
            return answer["agent_metadata"]["reward"]
        question = task if isinstance(task, str) else str(task[-1]["content"])
        return await self._reward(question, response_text(answer), [], [], data)
