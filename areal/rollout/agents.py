"""Episodes that an AgentService runs (``rollout.agents`` of a TrainJob).

The episode has a session at the inference service, as with any agent. The agent service gets that session's key and the
task, and runs its agent: so every call of the agent is recorded in the episode's session, with the versions of the
weights, and the job admits, rejects and exports it as any other episode.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from areal.client.agent import AsyncAgentClient, response_text
from areal.client.command import address_lookup
from areal.client.errors import ClientError, ServiceError
from areal.errors import NotFound, UsageFault
from areal.rollout.rlvr import RowReward
from areal.rollout.workflows import AGENTS_ADDRESS, AGENTS_KEY_FILE, AGENTS_RECORD, SessionWorkflow

if TYPE_CHECKING:
    from areal.client.inference import AsyncSession


class AgentEpisodeFailed(Exception):
    """The agent raised, or gave nonsense: the episode fails by fault of the workflow, and has no reward."""


class AgentServiceWorkflow(SessionWorkflow):
    """``address`` and ``admin_api_key_file`` of the agent service's gateway (else the environment's, as a TrainJob with
    ``rollout.agents`` sets it). The agent gets the row's ``prompt`` or ``messages``, and its other columns as metadata.
    ``reward_fn`` gives the reward of its answer; without one it is the agent's own, ``metadata["reward"]``."""

    def __init__(
        self,
        *,
        reward_fn: Any = None,
        reward_weights: list[float] | None = None,
        address: str | None = None,
        admin_api_key_file: str | None = None,
        **how: Any,
    ) -> None:
        super().__init__(**how)
        record = "" if address else os.environ.get(AGENTS_RECORD, "")
        address = address or os.environ.get(AGENTS_ADDRESS)
        if not address:
            hint = (
                f"spec.rollout.agents of a TrainJob, or workflow_kwargs.address=http://HOST:PORT, or {AGENTS_ADDRESS}"
            )
            raise UsageFault("nothing says where the agent service is", hint=hint)
        key = _key(admin_api_key_file or os.environ.get(AGENTS_KEY_FILE))
        self._client = AsyncAgentClient(address, key, lookup=address_lookup(record))
        self._reward = RowReward(reward_fn, weights=reward_weights) if reward_fn else None

    async def close(self) -> None:
        await self._client.close()

    async def run_session(self, session: AsyncSession, engine: Any, data: dict[str, Any]) -> Any:
        task = data.get("messages") or data.get("prompt")
        if not task:
            raise UsageFault(f"a row needs messages or prompt; this one has {', '.join(data) or 'nothing'}")
        metadata = {name: value for name, value in data.items() if name not in ("messages", "prompt")}
        key = f"episode-{uuid4().hex}"
        access = {"inf_base_url": engine.base_url, "inf_model": engine.model, "session_api_key": session.api_key}
        try:
            answer = await self._client.session(key).respond(task, metadata=metadata, **access)
        except ClientError as error:
            if error.code == "agent_failed":
                raise AgentEpisodeFailed(str(error)) from None
            if error.code == "foreign_inference":  # it moves with the inference service, a little later
                raise ServiceError(str(error), status=error.status, code=error.code) from error
            raise
        finally:
            with contextlib.suppress(ClientError):  # it expires
                await self._client.session(key).close()
        if self._reward is None:
            if "reward" not in answer["agent_metadata"]:
                hint = (
                    'reward_fn=module:function, or AgentResponse(metadata={"reward": 1.0}) (None rejects the episode)'
                )
                raise UsageFault("nothing says what the agent's answer is worth", hint=hint)
            return answer["agent_metadata"]["reward"]
        asked = task if isinstance(task, str) else str(task[-1]["content"])
        return await self._reward(asked, response_text(answer), [], [], data)


def _key(file: str | None) -> str | None:
    if not file:
        return None
    try:
        return Path(file).expanduser().read_text(encoding="ascii").strip()
    except OSError as error:
        raise NotFound(f"the key file {file} cannot be read: {error.strerror}") from error
