"""One pair as its trainer uses it: stage a version's weights, have the gateway carry them over, hear the outcome."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from areal.errors import ArealError, TimedOut
from areal.services.web.errors import ApiError
from areal.training.weights.endpoint import Outlet
from areal.training.weights.folders import Folders, Published

CONNECT_S = 300.0
UPDATE_S = 3600.0


class WeightUpdateFailed(ArealError):
    """The inference side does not have the version that was published; it serves the one before."""


@dataclass(frozen=True)
class Delivered:
    """Times are the gateway's: of the whole update, and of how long generation stood still."""

    version: int
    bytes: int
    duration_ms: float
    paused_ms: float


@dataclass
class FolderOutlet:
    """``disk`` and ``shm``: workers read for themselves. Assigning a Published is atomic."""

    folders: Folders
    staged: Published | None = None
    probe: dict[str, Any] | None = None

    def offer(self, name: str, size: int, group_form: str) -> dict[str, Any]:
        return self.folders.offer()

    def join(self) -> None:
        """Each worker proved that it reaches our folder when it was introduced."""

    def leave(self) -> None:
        """Nothing is held for a worker."""

    def write(self, version: int, weights: Iterable[tuple[str, Tensor]], probe: dict[str, Any] | None) -> None:
        self.probe = probe
        self.staged = self.folders.write(version, weights)

    def settle(self) -> None:
        """They are."""

    def send(self, version: int) -> None:
        """They read for themselves."""

    @property
    def staged_version(self) -> int | None:
        return None if self.staged is None else self.staged.version

    def staged_file(self, version: int) -> Path | None:
        return self.folders.file_of(version)

    def remove(self) -> None:
        self.folders.remove()

    def published(self, version: int) -> dict[str, Any]:
        staged = self.staged
        if staged is None or staged.version != version:
            has = "nothing" if staged is None else f"version {staged.version}"
            raise ApiError(409, f"version {version} is not staged: the trainer has {has}", code="not_staged")
        answer: dict[str, Any] = {"source": {"path": str(staged.folder)}, "bytes": staged.bytes}
        return answer | ({"probe": self.probe} if self.probe else {})


@dataclass
class Pair:
    """``inference`` is either {"inference_worker_urls": [...]} or {"inference_gateway_url": ..., "model": ...}."""

    name: str
    mode: str
    gateway: str
    endpoint: str
    inference: dict[str, Any]
    outlet: Outlet
    admin_key: str | None = None
    connected: bool = field(default=False, init=False)
    _opener: urllib.request.OpenerDirector = field(init=False, repr=False)  # no proxy is asked
    delivered: int | None = field(default=None, init=False)  # the version that is served

    def __post_init__(self) -> None:
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def connect(self) -> None:
        """Raises WeightUpdateFailed with the gateway's reason."""
        body = {"pair_name": self.name, "mode": self.mode, "train_worker_urls": [self.endpoint], **self.inference}
        self._post("/connect", body, CONNECT_S)
        self.connected = True

    def publish(
        self, version: int, weights: Iterable[tuple[str, Tensor]], probe: dict[str, Any] | None = None
    ) -> Delivered:
        """Stage ``weights`` and carry them over, at once where that can be. Raises WeightUpdateFailed: then the old
        version serves on."""
        self.outlet.write(version, weights, probe)
        try:
            return self.deliver(version)
        finally:
            self.outlet.settle()

    def stage(self, version: int, weights: Iterable[tuple[str, Tensor]], probe: dict[str, Any] | None = None) -> None:
        self.outlet.write(version, weights, probe)
        self.outlet.settle()

    def deliver(self, version: int) -> Delivered:
        done = self._post("/update_weights", {"pair_name": self.name, "version": version}, UPDATE_S)
        self.delivered = version
        return Delivered(version, int(done["bytes"]), float(done["duration_ms"]), float(done["paused_ms"]))

    def disconnect(self, left: Path | None = None, *, comes_back: bool = False) -> None:
        """Tell both sides; nothing to do where the gateway is gone. ``left``: a folder with what is served, for
        workers that start when we are gone; without it they serve what they start with, or wait for another trainer
        where one ``comes_back``."""
        if self.connected:
            self.connected = False
            body: dict[str, Any] = {"pair_name": self.name}
            if not comes_back:
                body["left"] = None if left is None else {"path": str(left), "version": self.delivered}
            try:
                self._post("/disconnect", body, 60.0)
            except (WeightUpdateFailed, TimedOut):
                return

    def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.admin_key is not None:
            headers["Authorization"] = f"Bearer {self.admin_key}"
        request = urllib.request.Request(self.gateway + path, json.dumps(body).encode(), headers)
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            raise WeightUpdateFailed(f"pair {self.name!r}: {_reason(error)}") from error
        except TimeoutError as error:
            raise TimedOut(
                f"pair {self.name!r}: the weight-update gateway did not answer within {timeout_s:g} s"
            ) from error
        except (OSError, ValueError) as error:
            raise WeightUpdateFailed(
                f"pair {self.name!r}: the gateway at {self.gateway} does not answer: {error}"
            ) from error


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered {error.code}"
