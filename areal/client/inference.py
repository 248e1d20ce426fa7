"""The asyncio client of an inference service: model calls, sessions with rewards, exports, online leases.

A client holds one connection pool; create one and share it. Every call has a deadline (``timeout_s``, by default the
client's) and raises the errors of ``areal.client.errors``. Requests and responses of model calls are OpenAI's, as plain
dicts; fields that are None are omitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote
from uuid import uuid4

from areal.client.errors import CallerError, ClientError, DeadlineExceeded, ServiceError, UnknownName
from areal.client.transport import AddressLookup, AsyncClient, HttpCall, RetryPolicy, Transport, events
from areal.dataclasses import dataclass, field
from areal.errors import did_you_mean
from areal.wire.bodies import EndSession, ExportTrajectories, RegisterTarget, Rewarded, SetReward, StartSession
from areal.wire.fields import write_fields

if TYPE_CHECKING:
    from areal.client.trajectories import Lease, Trajectories

Message = Mapping[str, object]
_CONTROL_S = 200.0  # longer than the gateway's own deadline on its workers
_log = logging.getLogger(__name__)
CHAT = "/v1/chat/completions"
_READY_PERIOD_S = 0.2
_PROBE_S = 5.0
_SETTLED_S = 3.0  # a missing model is reported as unknown after so long without changes


def rewarded_from_json(data: Mapping[str, Any]) -> Rewarded:
    return Rewarded(**{name: data[name] for name in Rewarded.__dataclass_fields__})


@dataclass(frozen=True)
class AsyncSession:
    """One recorded session. Its model calls carry its key, and the service records the tokens that they sample."""

    client: AsyncInferenceClient = field(repr=False)
    session_id: str
    api_key: str = field(repr=False)
    group_id: str | None = None

    async def chat(self, /, messages: Sequence[Message], **fields: Any) -> dict[str, Any]:
        return await self.client.chat(messages, key=self.api_key, **fields)

    def stream_chat(
        self, messages: Sequence[Message], **fields: Any
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        return self.client.stream_chat(messages, key=self.api_key, **fields)

    async def reward(self, value: float, interaction_id: str | None = None) -> Rewarded:
        """Reward an interaction. Without ``interaction_id`` it is the newest one, and its trajectory is sealed."""
        return await self.client.set_reward(value, key=self.api_key, interaction_id=interaction_id)

    async def end(self) -> list[int]:
        """End the session, and return the ids of its trajectories that are ready. Idempotent."""
        return await self.client.end_session(key=self.api_key)

    async def export(self, /, **options: Any) -> Trajectories:
        return await self.client.export([self.session_id], **options)


@dataclass(frozen=True)
class AsyncGroup:
    """Sessions that answer one prompt. They can share a replica, and so its prefix cache."""

    client: AsyncInferenceClient = field(repr=False)
    group_id: str
    sessions: tuple[AsyncSession, ...]

    async def export(self, /, **options: Any) -> Trajectories:
        return await self.client.export([each.session_id for each in self.sessions], group_id=self.group_id, **options)


# ``worker`` is an id, or ``all``. A control operation that fails on some workers raises ServiceError, which names them;
# it remains in effect on the others.

ALL = "all"


class AsyncWorkers:
    """Control operations on the workers of an inference service."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> list[dict[str, Any]]:
        """Return the workers, each with id, address, state, health, requests and tokens in flight, weight version."""
        return list((await self._transport.json("GET", "/workers", repeatable=True))["workers"])

    async def pause(self, worker: str = ALL) -> None:
        """Pause generation. On return, no further token is sampled from the current weights. Running calls are kept."""
        await self._control("/pause_generation", worker)

    async def resume(self, worker: str = ALL) -> None:
        await self._control("/continue_generation", worker)

    async def release_memory(self, worker: str = ALL) -> None:
        await self._control("/release_memory_occupation", worker)

    async def resume_memory(self, worker: str = ALL) -> None:
        await self._control("/resume_memory_occupation", worker)

    async def set_version(self, version: int, worker: str = ALL, *, force: bool = False) -> None:
        """Set the weight version of tokens sampled from now on. It cannot decrease unless ``force`` is set."""
        await self._control("/set_version", worker, {"version": version, **({"force": True} if force else {})})

    async def get_version(self, worker: str = ALL) -> int | None:
        """Return the weight version of the worker; of all workers, None if they differ."""
        path = f"/get_version/{quote(worker, safe='')}"
        answer = await self._transport.json("GET", path, timeout_s=_CONTROL_S, repeatable=True)
        _check(path, answer)
        version = answer["version"]
        return int(version) if version is not None else None

    async def versions(self) -> dict[str, int]:
        """Return the weight versions by worker address, of the workers that report one."""
        answer = await self._transport.json("GET", "/get_version/all", timeout_s=_CONTROL_S, repeatable=True)
        versions = {each["worker_addr"]: each.get("version") for each in answer["results"]}
        return {address: version for address, version in versions.items() if isinstance(version, int)}

    async def drain(self, worker: str = ALL) -> None:
        """Stop routing new calls to the worker. Running calls finish."""
        await self._control("/drain", worker)

    async def undrain(self, worker: str = ALL) -> None:
        await self._control("/undrain", worker)

    async def register_model(self, model: str, data_proxy_addrs: Sequence[str]) -> None:
        """Register running data proxies with this gateway under a model name. Either all are registered or none."""
        body = {"model": model, "data_proxy_addrs": list(data_proxy_addrs)}
        await self._transport.call(HttpCall("POST", "/register_model", body, repeatable=True))

    async def deregister_model(self, model: str) -> None:
        await self._transport.call(HttpCall("POST", "/deregister_model", {"model": model}))

    async def _control(self, path: str, worker: str, body: Mapping[str, object] | None = None) -> None:
        path = f"{path}/{quote(worker, safe='')}"
        _check(path, await self._transport.json("POST", path, body or {}, timeout_s=_CONTROL_S, repeatable=True))


def _check(path: str, answer: Mapping[str, Any]) -> None:
    failed = [result for result in answer.get("results", ()) if not result["ok"]]
    if failed:
        errors = "; ".join(f"{each['worker_id']}: {each.get('error')}" for each in failed)
        raise ServiceError(f"{path} failed on {len(failed)} of {len(answer['results'])} workers: {errors}", status=207)


Style = Literal["individual", "concat"]
Format = Literal["npz", "json"]

COMPLETIONS = "/v1/completions"


class AsyncInferenceClient(AsyncClient):
    """The client of an inference service. ``base_url``: the address of a gateway (or of a data proxy), without ``/v1``.
    ``model``: the default model of calls. Use it as ``async with``, or close it."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        model: str | None = None,
        timeout_s: float = 600.0,
        retry: RetryPolicy | None = None,
        connections: int = 1024,
        lookup: AddressLookup | None = None,
    ) -> None:
        """``lookup`` returns the service's current address. It is called when a connection is refused."""
        super().__init__(base_url, api_key, timeout_s=timeout_s, retry=retry, connections=connections, lookup=lookup)
        self.model = model
        self._skipped: set[tuple[str, int]] = set()
        self.workers = AsyncWorkers(self.transport)

    async def current_address(self) -> str:
        """Call the service and return its address; the new address if it has moved and answers there."""
        with contextlib.suppress(ClientError):
            await self.transport.json("GET", "/health", timeout_s=_PROBE_S, repeatable=True)
        return self.base_url

    async def models(self) -> list[str]:
        return [entry["id"] for entry in await self.model_entries()]

    async def model_entries(self) -> list[dict[str, Any]]:
        """Return served models, with ``max_model_len`` where the gateway knows it."""
        return list((await self.transport.json("GET", "/v1/models", repeatable=True))["data"])

    async def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Wait until the service answers and serves a model, ``model`` if this client has one. Logs the reason of the
        wait. Raises DeadlineExceeded with what is missing; earlier, an error if the key is refused, and UnknownName if
        the service only has other models and no further one is starting."""
        deadline = time.monotonic() + timeout_s
        before = logged = ""
        settled_at: float | None = None
        while (missing := await self._missing()) is not None:
            now = time.monotonic()
            settled = missing == before and await self._settled()
            settled_at = (settled_at or now) if settled else None
            if settled_at is not None and now - settled_at >= _SETTLED_S:
                raise UnknownName(
                    f"{self.base_url}: {missing}",
                    param="model",
                    hint="areal inf models lists them; one that is still to be started: areal wait model/NAME before",
                )
            if now + _READY_PERIOD_S >= deadline:
                raise DeadlineExceeded(f"{self.base_url} is not ready after {timeout_s:g} s: {missing}")
            if missing == before != logged:
                logged = missing
                _log.warning("waiting for %s, %g s at most: %s", self.base_url, timeout_s, missing)
            before = missing
            await asyncio.sleep(_READY_PERIOD_S)

    async def _missing(self) -> str | None:
        try:
            answer = await self.transport.json("GET", "/v1/models", timeout_s=_PROBE_S)
        except CallerError:
            raise
        except ClientError as error:
            return error.message
        names = [entry["id"] for entry in answer["data"]]
        if self.model is None:
            return None if names else "no model is served"
        if self.model in names:
            return None
        return f"model {self.model!r} is not served; there is {names or 'none'}{did_you_mean(self.model, names)}"

    async def _settled(self) -> bool:
        """Return whether the whole routing table is known and all workers are ready: no missing model will appear."""
        try:
            health = await self.transport.json("GET", "/health", timeout_s=_PROBE_S)
            workers = await self.workers.list()
        except ClientError:
            return False
        whole = (health.get("table") or {}).get("synced") is True
        return whole and bool(workers) and all(worker["state"] == "ready" for worker in workers)

    async def chat(
        self,
        /,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        key: str | None = None,
        idempotency_key: str | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Return a whole chat completion. A call without a response is repeated, and recorded once, because it carries
        an ``Idempotency-Key``: a new one unless you set it."""
        body = self._body(model, {"messages": list(messages), **fields})
        return await self._model_call(CHAT, body, key, idempotency_key, timeout_s)

    async def complete(
        self,
        /,
        prompt: str | Sequence[int] | Sequence[Sequence[int]],
        *,
        model: str | None = None,
        key: str | None = None,
        idempotency_key: str | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Return a text completion of a text, of token ids, or of several prompts of token ids. With
        ``return_token_ids``, choices have ``token_ids``, ``token_logprobs``, ``versions`` and ``prompt_token_ids``."""
        body = self._body(model, {"prompt": prompt if isinstance(prompt, str) else list(prompt), **fields})
        return await self._model_call(COMPLETIONS, body, key, idempotency_key, timeout_s)

    async def _model_call(
        self, path: str, body: Any, key: str | None, idempotency_key: str | None, timeout_s: float | None
    ) -> dict[str, object]:
        headers = {"Idempotency-Key": idempotency_key or uuid4().hex}
        return await self.transport.json(
            "POST", path, body, key=key, headers=headers, timeout_s=timeout_s, repeatable=True
        )

    @contextlib.asynccontextmanager
    async def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        key: str | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Yield the chunks of a chat completion. Leaving ends the generation. ``timeout_s``: between two chunks."""
        body = self._body(model, {"messages": list(messages), **fields, "stream": True})
        call = HttpCall("POST", CHAT, body, key, {"Idempotency-Key": uuid4().hex}, timeout_s)
        silence_s = self.timeout_s if timeout_s is None else timeout_s
        async with self.transport.stream(call) as response:
            yield events(response, f"POST {self.base_url}{CHAT}", silence_s)

    def _body(self, model: str | None, fields: Mapping[str, object]) -> dict[str, object]:
        named = model or self.model
        given = {name: value for name, value in fields.items() if value is not None}
        return {**({"model": named} if named else {}), **given}

    async def start_group(
        self,
        task_id: str,
        group_size: int = 1,
        *,
        api_key: str | None = None,
        model: str | None = None,
        online: bool = False,
        seed: int | None = None,
        default_seed: int | None = None,
    ) -> AsyncGroup:
        """Start a group of sessions. ``api_key``: the key of the first session. ``online``: any client may lease its
        trajectories. ``seed``: calls without a seed get seeds derived from it; ``default_seed``: only if the engine
        samples as fast with seeds. The call is not repeated if its response is lost: unknown sessions expire."""
        model = model or self.model
        body = StartSession(
            task_id=task_id,
            group_size=group_size,
            api_key=api_key,
            model=model,
            online=online,
            seed=seed,
            default_seed=default_seed,
        )
        answer = await self.transport.json("POST", "/rl/start_session", write_fields(body))
        group_id = answer["group_id"]
        sessions = (
            AsyncSession(self, each["session_id"], each["session_api_key"], group_id) for each in answer["sessions"]
        )
        return AsyncGroup(self, group_id, tuple(sessions))

    async def start_session(self, task_id: str, **options: Any) -> AsyncSession:
        return (await self.start_group(task_id, **options)).sessions[0]

    async def set_reward(
        self,
        reward: float,
        *,
        key: str | None = None,
        interaction_id: str | None = None,
        session_id: str | None = None,
        model: str | None = None,
    ) -> Rewarded:
        """Reward an interaction, with the ``key`` of a session, or with the admin key and ``session_id`` (without it:
        the session of the human in the loop). Setting the same reward again succeeds; another reward on a sealed
        trajectory raises StateConflict."""
        body = SetReward(reward=reward, interaction_id=interaction_id, session_id=session_id, model=model)
        answer = await self.transport.json("POST", "/rl/set_reward", write_fields(body), key=key, repeatable=True)
        return rewarded_from_json(answer)

    async def end_session(self, *, key: str | None = None, session_id: str | None = None) -> list[int]:
        body = write_fields(EndSession(session_id=session_id))
        answer = await self.transport.json("POST", "/rl/end_session", body, key=key, repeatable=True)
        return list(answer["ready_trajectory_ids"])

    async def sessions(self, page: int = 1000) -> AsyncIterator[dict[str, Any]]:
        """Yield every session, in the order in which they were started."""
        async for session in self.transport.sessions("/rl/sessions", page):
            yield session

    async def session(self, session_id: str) -> dict[str, Any]:
        """Return a session with its trajectories and their interactions."""
        path = f"/rl/sessions/{quote(session_id, safe='')}"
        return await self.transport.json("GET", path, repeatable=True)

    async def export(
        self,
        session_ids: Sequence[str],
        *,
        group_id: str | None = None,
        trajectory_id: int | None = None,
        discount: float = 1.0,
        style: Style = "individual",
        remove_session: bool = True,
        format: Format = "npz",
        reward: float | None = None,
        timeout_s: float | None = None,
    ) -> Trajectories:
        """Return training rows. The same request returns the same export, until another trajectory of the sessions is
        ready, the export is acknowledged, or its retention has passed. ``json`` is for sessions of external models,
        whose turns are text. ``reward``: the reward of the last interaction of a single session, set first, in the same
        call. Raises NotReady, UnknownName."""
        from areal.client.trajectories import from_json, from_npz

        export = ExportTrajectories(
            session_ids=tuple(session_ids),
            group_id=group_id,
            trajectory_id=trajectory_id,
            discount=discount,
            style=style,
            remove_session=remove_session,
            format=format,
            reward=reward,
        )
        body = write_fields(export)
        call = HttpCall("POST", "/export_trajectories", body, timeout_s=timeout_s, repeatable=True)
        answer = await self.transport.call(call)
        return from_npz(answer.body) if format == "npz" else from_json(answer.json())

    async def acknowledge(self, export: Trajectories | str) -> None:
        """Acknowledge an export that the caller has stored. The service may then delete it."""
        export_id = export if isinstance(export, str) else export.export_id
        await self.transport.call(
            HttpCall("POST", "/export_trajectories/ack", {"export_id": export_id}, repeatable=True)
        )

    async def lend(
        self,
        limit: int = 1,
        wait_s: float = 0.0,
        kind: Literal["tokens", "text"] | None = None,
        *,
        discount: float = 1.0,
        style: Style = "individual",
    ) -> list[Lease]:
        """Lease up to ``limit`` ready trajectories of online sessions. Waits up to ``wait_s`` seconds (at most 300) for
        the first one. Trajectories that are not acknowledged are offered again. ``kind``: only trajectories of token
        models, or only of external ones. Trajectories that the service cannot export are skipped and logged once.
        ``discount`` and ``style`` are those of ``export``."""
        from areal.client.trajectories import lease_from_json

        path = f"/trajectories?wait={wait_s:g}&limit={limit}" + (f"&kind={kind}" if kind else "")
        path += f"&discount={discount!r}" if discount != 1.0 else ""
        path += f"&style={style}" if style != "individual" else ""
        answer = await self.transport.json("GET", path, timeout_s=wait_s + self.timeout_s)
        for skipped in answer.get("skipped") or ():
            place = skipped["session_id"], skipped["trajectory_id"]
            if place not in self._skipped:
                self._skipped.add(place)
                _log.warning("trajectory %s of session %s cannot be leased: %s", *reversed(place), skipped["message"])
        return [lease_from_json(item) for item in answer["items"]]

    async def register_scrape_target(self, target: str, labels: Mapping[str, str], ttl_s: float) -> None:
        """Register ``target`` (host:port) in the service's list for Prometheus, ``GET /http_sd``, for this time."""
        body = write_fields(RegisterTarget(target=target, labels=dict(labels), ttl_seconds=ttl_s))
        await self.transport.call(HttpCall("POST", "/http_sd", body, repeatable=True))

    async def acknowledge_leases(self, leases: Sequence[Lease | str]) -> None:
        """Acknowledge trajectories, or lease ids, that the caller has stored. The service deletes them."""
        body = {"lease_ids": [lease if isinstance(lease, str) else lease.lease_id for lease in leases]}
        await self.transport.call(HttpCall("POST", "/trajectories/ack", body, repeatable=True))
