"""Which inference service rollouts are sampled from, and a client of it once it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from areal.client.errors import CallerError, DeadlineExceeded
from areal.client.inference import AsyncInferenceClient
from areal.errors import NotFound, UsageFault

if TYPE_CHECKING:
    from areal.api.config.rollout import InferenceEngineConfig

ADDRESS, KEY_FILE, MODEL = "AREAL_INFERENCE_ADDR", "AREAL_INFERENCE_KEY_FILE", "AREAL_INFERENCE_MODEL"
_POLL_S = 0.5


class Service(NamedTuple):
    address: str
    key: str | None = None
    model: str | None = None

    def __repr__(self) -> str:
        return f"Service({self.address!r}, model={self.model!r})"


def find_service(config: InferenceEngineConfig, given: Service, environment: Mapping[str, str]) -> Service:
    """What is given counts first, then the configuration, then the environment; where only that says which service, it
    also says which model, for a job may have another one than its configuration names. Raises UsageFault where nothing
    says where it is, NotFound for a key file that cannot be read."""
    address = given.address or config.gateway_addr or environment.get(ADDRESS)
    if not address:
        raise UsageFault(
            "nothing says where the inference service is",
            hint=f"rollout.gateway_addr=http://HOST:PORT, or {ADDRESS}; areal inf status shows it",
        )
    key = given.key or config.admin_api_key or None
    key_file = config.admin_api_key_file or environment.get(KEY_FILE)
    if key is None and key_file:
        try:
            key = Path(key_file).expanduser().read_text(encoding="ascii").strip()
        except OSError as error:
            raise NotFound(f"the key file {key_file} cannot be read: {error.strerror}") from error
    told = environment.get(MODEL)
    model = told or config.model if not (given.address or config.gateway_addr) else config.model or told
    return Service(address, key, given.model or model or None)


async def open_service(service: Service, config: InferenceEngineConfig) -> tuple[AsyncInferenceClient, int | None]:
    """A client, and how many tokens the model has room for, where the service says it. Raises ClientError."""
    client = AsyncInferenceClient(service.address, service.key, model=service.model, timeout_s=config.request_timeout)
    try:
        await client.wait_ready(config.setup_timeout)
        if config.min_required_servers > 1:
            await _wait_servers(client, config.min_required_servers, config.setup_timeout)
        return client, await _room(client)
    except BaseException:
        await client.close()
        raise


async def _room(client: AsyncInferenceClient) -> int | None:
    mine = [each for each in await client.model_entries() if client.model in (None, each["id"])]
    return mine[0].get("max_model_len") if mine else None


async def servers_of(client: AsyncInferenceClient) -> int:
    """How many servers the model has; 0 where we may not know. Raises ClientError."""
    try:
        return sum(_serves(client, each) for each in await client.workers.list())
    except CallerError:
        return 0


async def _wait_servers(client: AsyncInferenceClient, wanted: int, timeout_s: float) -> None:
    ready = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                ready = sum(each["state"] == "ready" for each in await client.workers.list() if _serves(client, each))
                if ready >= wanted:
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{ready} of {wanted} servers are ready after {timeout_s:g} s") from error


def _serves(client: AsyncInferenceClient, worker: Mapping[str, Any]) -> bool:
    return client.model is None or worker.get("model") in (None, client.model)
