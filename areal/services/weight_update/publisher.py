"""The trainer's end of a pair: stages the weights of a version, and requests updates from the gateway.

The trainer's main thread writes the weights, because all its ranks take part. Its endpoint, an HTTP server in a
separate thread, serves the staged weights. Requests therefore never wait for training, nor training for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from areal.client.gateway import NoResponse, ServiceClient
from areal.dataclasses import dataclass, field
from areal.errors import ArealError, TimedOut
from areal.resources.addresses import is_loopback
from areal.services.http.auth import Access, AdminKey
from areal.services.http.errors import ApiError
from areal.services.http.messages import Request, Response, read_body
from areal.services.http.serve import serve_in_thread
from areal.services.http.service import Service, json_response
from areal.wire import bodies
from areal.wire.fields import read_fields

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_CONNECT_S = 300.0
_UPDATE_S = 3600.0
_DISCONNECT_S = 60.0


class WeightPublisher(Protocol):
    """Publishes weights in one mode. The endpoint's threads call all methods except ``write`` and ``settle``."""

    def offer(self, name: str, size: int, group_form: str) -> dict[str, object]:
        """Return the connection data for workers of the pair ``name``. ``size`` counts the workers and the trainer."""

    def join(self) -> None:
        """Wait until all workers are connected. Raises RuntimeError if one does not connect."""

    def leave(self) -> None:
        """Close the connections to workers. Idempotent."""

    def write(self, version: int, weights: Iterable[tuple[str, Tensor]], probe: bodies.ProbeOfWeights | None) -> None:
        """Begin to stage ``weights``, on the trainer's thread. The caller must not change them until ``settle``."""

    def settle(self) -> None:
        """Wait until all weights are staged, on the trainer's thread. Raises the error of the staging."""

    def published(self, version: int) -> bodies.PublishedVersion:
        """Return the staged version. Raises ApiError 409 if another version is staged."""

    def send(self, version: int) -> None:
        """Send the version to workers that receive a broadcast; do nothing for workers that read the weights
        themselves. Raises RuntimeError if a worker is lost."""

    @property
    def staged_version(self) -> int | None:
        """The newest staged version; None before the first."""

    def staged_file(self, version: int) -> Path | None:
        """Return the safetensors file that is staged as ``version``, or None if that version is not staged."""

    def remove(self) -> None:
        """Delete all staged weights."""


class WeightEndpoint:
    """The trainer's HTTP endpoint. ``publishers`` by pair name: a trainer with several models has a pair for each."""

    def __init__(self, publishers: dict[str, WeightPublisher], key: AdminKey | None, *, loopback: bool) -> None:
        self._publishers = publishers
        self._connected: set[str] = set()
        self.service = Service("weight-endpoint", key=key, loopback=loopback)
        self.service.route("POST", "/weights/connect", self.connect, Access.ADMIN)
        self.service.route("POST", "/weights/join", self.join, Access.ADMIN)
        self.service.route("POST", "/weights/manifest", self.manifest, Access.ADMIN)
        self.service.route("POST", "/weights/staged", self.staged, Access.ADMIN)
        self.service.route("POST", "/weights/publish", self.publish, Access.ADMIN)
        self.service.route("POST", "/weights/disconnect", self.disconnect, Access.ADMIN)

    async def connect(self, request: Request) -> Response:
        body = await read_body(request, bodies.OfferWeights)
        publisher = self._publisher(body.pair_name)
        offer = await asyncio.to_thread(publisher.offer, body.pair_name, body.world_size, body.group_form or "")
        self._connected.add(body.pair_name)
        return json_response({"status": "ok", "pair_name": body.pair_name, **offer})

    async def join(self, request: Request) -> Response:
        body = await read_body(request, bodies.NamePair)
        with _lost_workers():
            await asyncio.to_thread(self._publisher(body.pair_name).join)
        return json_response({"status": "ok", "pair_name": body.pair_name})

    async def staged(self, request: Request) -> Response:
        """Return the newest version that ``publish`` could send. Its update may not have been requested yet."""
        body = await read_body(request, bodies.NamePair)
        return json_response({"status": "ok", "version": self._publisher(body.pair_name).staged_version})

    async def manifest(self, request: Request) -> Response:
        """Return the source and size of the weights that ``publish`` will send."""
        body = await read_body(request, bodies.WeightOrder)
        return json_response({"status": "ok", **self._publisher(body.pair_name).published(body.version)})

    async def publish(self, request: Request) -> Response:
        body = await read_body(request, bodies.WeightOrder)
        publisher = self._publisher(body.pair_name)
        with _lost_workers():
            await asyncio.to_thread(publisher.send, body.version)
        return json_response({"status": "ok", **publisher.published(body.version)})

    async def disconnect(self, request: Request) -> Response:
        name = (await read_body(request, bodies.NamePair)).pair_name
        known = name in self._connected
        self._connected.discard(name)
        if known:
            await asyncio.to_thread(self._publisher(name).leave)
        return json_response({"status": "ok", "pair_name": name, "known": known})

    def _publisher(self, name: str) -> WeightPublisher:
        publisher = self._publishers.get(name)
        if publisher is None:
            raise ApiError(404, f"this trainer has no pair {name!r}", code="pair_not_found", param="pair_name")
        return publisher


@contextlib.contextmanager
def _lost_workers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ApiError(502, f"the process group broke: {error}", code="group_broken") from error


def serve_endpoint(
    publishers: dict[str, WeightPublisher], key: AdminKey | None, host: str = "127.0.0.1"
) -> contextlib.AbstractContextManager[str]:
    """Serve the endpoint while the block runs, and yield its address."""
    return serve_in_thread(WeightEndpoint(publishers, key, loopback=is_loopback(host)).service, host)


class WeightUpdateFailed(ArealError):
    """An update failed: the inference side serves the previous version."""


@dataclass
class TrainerPair:
    """A pair as its trainer uses it. ``inference`` is either {"inference_worker_urls": [...]} or
    {"inference_gateway_url": ..., "model": ...}; then ``current_address`` returns that gateway's present address."""

    name: str
    mode: str
    gateway: str
    endpoint: str
    inference: Mapping[str, object]
    publisher: WeightPublisher
    admin_key: str | None = None
    current_address: Callable[[], str] | None = None
    connected: bool = field(default=False, init=False)
    delivered: int | None = field(default=None, init=False)  # the version that is served

    def connect(self) -> None:
        """Connect the pair. Raises WeightUpdateFailed with the gateway's reason, and TimedOut."""
        body = {"pair_name": self.name, "mode": self.mode, "train_worker_urls": [self.endpoint], **self.inference}
        self._post("/connect", body, _CONNECT_S)
        self.connected = True

    def publish(
        self, version: int, weights: Iterable[tuple[str, Tensor]], probe: bodies.ProbeOfWeights | None = None
    ) -> bodies.UpdateResult:
        """Stage ``weights`` and transfer them, in parallel if the mode allows. Raises WeightUpdateFailed if workers
        still serve the old version."""
        self.publisher.write(version, weights, probe)
        try:
            return self.deliver(version)
        finally:
            self.publisher.settle()

    def stage(
        self, version: int, weights: Iterable[tuple[str, Tensor]], probe: bodies.ProbeOfWeights | None = None
    ) -> None:
        """Stage ``weights`` without a transfer."""
        self.publisher.write(version, weights, probe)
        self.publisher.settle()

    def deliver(self, version: int) -> bodies.UpdateResult:
        """Transfer the staged ``version``. Raises as ``publish`` does."""
        published = self.publisher.published(version)
        body: dict[str, object] = {"pair_name": self.name, "version": version, "published": published}
        if self.current_address is not None:
            body["inference_gateway_url"] = self.current_address()
        done = self._post("/update_weights", body, _UPDATE_S)
        self.delivered = version
        return read_fields(bodies.UpdateResult, done, lenient=True)

    def disconnect(self, left: Path | None = None, *, comes_back: bool = False) -> None:
        """Disconnect both sides; a gateway that is gone is ignored.

        ``left``: a folder with the served weights, for workers that start later. Without it, such workers serve their
        initial weights, or wait for another trainer if ``comes_back`` is set.
        """
        if self.connected:
            self.connected = False
            body: dict[str, object] = {"pair_name": self.name}
            if not comes_back:
                body["left"] = None if left is None else {"path": str(left), "version": self.delivered}
            with contextlib.suppress(WeightUpdateFailed, TimedOut):
                self._post("/disconnect", body, _DISCONNECT_S)

    def _post(self, path: str, body: dict[str, object], timeout_s: float) -> dict[str, object]:
        try:
            status, answer = ServiceClient(self.gateway, self.admin_key, timeout_s).ask("POST", path, body)
        except NoResponse as error:
            if error.is_late:
                raise TimedOut(
                    f"pair {self.name!r}: the weight-update gateway did not answer within {timeout_s:g} s"
                ) from error
            raise WeightUpdateFailed(
                f"pair {self.name!r}: the gateway at {self.gateway} does not answer: {error.why}"
            ) from error
        if status == 200 and isinstance(answer, dict):
            return answer
        try:
            reason = str(answer["error"]["message"])
        except (KeyError, TypeError):
            reason = f"the gateway answered {status}"
        raise WeightUpdateFailed(f"pair {self.name!r}: {reason}")
