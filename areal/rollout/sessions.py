"""Recorded sessions of episodes: start for a group, reward and seal, export, discard.

``seal`` computes the order of the calls that reward and seal a session, without I/O: it yields calls and receives the
responses of the session routes. The reward of the newest interaction seals its trajectory, so rewards are sent oldest
first. A session whose calls alternated between a token model and an external one has several trajectories, which all
get the reward of the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import reprlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from areal.errors import ArealError, UsageFault
from areal.http import tracing
from areal.reward.functions import float_of
from areal.wire.bodies import LARGEST_F32, ExportTrajectories
from areal.wire.fields import write_fields

if TYPE_CHECKING:
    from areal.client.inference import AsyncInferenceClient, AsyncSession, Style

CLEAN_UP_S = 10.0
M = TypeVar("M")


class SessionCall(NamedTuple):
    """A call of a session route. ``interaction_id`` None: the newest interaction."""

    kind: Literal["describe", "reward", "end"]
    reward: float = 0.0
    interaction_id: str | None = None


def seal(reward: float | Mapping[str, float]) -> Generator[SessionCall, Mapping[str, Any], None]:
    """Yield the calls that reward and seal a session. ``reward``: one number for the episode, or numbers by interaction
    id ("" is the newest). Ends the session if no reward seals it. Raises UsageFault for an unknown id, and for
    a reward that is not a finite number."""
    try:
        items = reward.items() if isinstance(reward, Mapping) else [("", reward)]
        rewards = {name: float_of(each) for name, each in items}
        if not all(abs(each) <= LARGEST_F32 for each in rewards.values()):  # nor NaN
            raise ValueError("not finite in a row's float32")
    except (TypeError, ValueError, OverflowError) as error:
        found = reprlib.repr(reward)
        raise UsageFault(
            f"the agent's reward is {found}; it must be a finite number, or finite numbers by interaction id"
        ) from error
    order: list[str] = []
    if any(rewards):
        session = yield SessionCall("describe")
        order = [each["interaction_id"] for item in session["trajectories"] for each in item["interactions"]]
        if unknown := [name for name in rewards if name and name not in order]:
            raise UsageFault(f"the agent rewards {unknown[0]!r}, which is not an interaction of its session")
    sealed = False
    for name in sorted(rewards, key=[*order, ""].index):
        answer = yield SessionCall("reward", rewards[name], name or None)
        has_several = answer["trajectory_id"] > 0
        if has_several and not name:
            session = yield SessionCall("describe")
            for trajectory in session["trajectories"]:
                if trajectory["state"] == "open" and trajectory["interactions"]:
                    newest = trajectory["interactions"][-1]["interaction_id"]
                    yield SessionCall("reward", rewards[name], newest)
        sealed = bool(answer["trajectory_ready"]) and not (has_several and name)
    if not sealed:
        yield SessionCall("end")


async def reward_session(session: AsyncSession, reward: float | Mapping[str, float]) -> None:
    """Reward and seal a session at once, without the service's grace period for further rewards."""
    steps, answer = seal(reward), None
    value = {"areal.reward": reward} if isinstance(reward, int | float) else None
    with tracing.span("set_reward", value), contextlib.suppress(StopIteration):
        while True:
            call = steps.send(answer)  # type: ignore[arg-type]  # None starts it
            if call.kind == "describe":
                answer = await session.client.session(session.session_id)
            elif call.kind == "reward":
                answer = vars(await session.reward(call.reward, call.interaction_id))
            else:
                await session.end()


async def export_document(
    client: AsyncInferenceClient, session_id: str, discount: float = 1.0, style: Style = "individual"
) -> dict[str, Any]:
    """Return the export of a session as JSON, without NumPy. Raises NotReady, UnknownName."""
    body = ExportTrajectories(session_ids=(session_id,), discount=discount, style=style)
    path, options = "/export_trajectories", {"repeatable": True}
    return dict(await client.transport.json("POST", path, write_fields(body), **options))


async def discard(client: AsyncInferenceClient, session_id: str) -> None:
    """End a session and discard its trajectories. If the calls fail, the session expires later."""
    with contextlib.suppress(ArealError, TimeoutError):
        async with asyncio.timeout(CLEAN_UP_S):
            await client.end_session(session_id=session_id)
            await client.acknowledge((await export_document(client, session_id))["export_id"])


class GroupSessions(Generic[M]):
    """Sessions for the members of a group. The first member that needs one starts all of them, so that they can share a
    replica and its prefix cache. ``started`` is called with each session before it is used."""

    def __init__(
        self,
        client: AsyncInferenceClient,
        task_id: str,
        members: Sequence[M],
        started: Callable[[M, AsyncSession], None] = lambda member, session: None,
        **options: Any,
    ) -> None:
        """Prepare the sessions of ``members``. ``options``: further arguments of ``start_group``."""
        self._client = client
        self._task_id = task_id
        self._members = members
        self._started = started
        self._options = options
        self._lock = asyncio.Lock()
        self._has_started = False
        self._ready: dict[M, AsyncSession] = {}

    async def take(self, member: M) -> AsyncSession:
        """Return a session for a member: a new one at each call. Raises ClientError."""
        async with self._lock:
            if member not in self._ready:
                together = (member,) if self._has_started else self._members
                group = await self._client.start_group(self._task_id, len(together), **self._options)
                self._has_started = True
                for each, session in zip(together, group.sessions, strict=True):
                    self._ready[each] = session
                    self._started(each, session)
            return self._ready.pop(member)
