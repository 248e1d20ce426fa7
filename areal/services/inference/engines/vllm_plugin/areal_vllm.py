"""Methods that ``--worker-extension-cls areal_vllm.Worker`` adds to vLLM's worker processes: they load weights from a
folder, or receive them from the trainer in a process group.

vLLM's own reload silently keeps the old head if the head is tied to the embedding: on a CPU, vLLM repacks the head's
matrix when it loads a model, but not when it reloads weights. The methods here repack it. New weights are checked
before anything is loaded, because a reload that stops halfway leaves a mixed model.

Long operations (joining a group, reading, receiving) run in a thread while vLLM generates; ``areal_state`` reports
their progress. A new operation or ``areal_forget`` cancels the previous one, which then stops waiting for its process
group. Received weights stay in host memory until they are loaded. If there are several workers, only the first joins
the process group, and sends the weights to the others.

``--middleware areal_vllm.RequireKey`` requires the key in ``$AREAL_ENGINE_KEY`` on all routes, for servers beyond
loopback: vLLM's own ``--api-key`` protects only ``/v1``, and its development mode allows callers to run methods.

This file imports only packages of vLLM's environment, because areal is not installed there.
"""

from __future__ import annotations

import datetime
import hmac
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

_PIECE = 32 * 1024 * 1024  # bytes of one broadcast, as the trainer sends them
_TIMEOUT = datetime.timedelta(seconds=300)
_CONNECT = datetime.timedelta(seconds=30)  # once all members are there
_LOOK = datetime.timedelta(seconds=0.5)
_MEET_S = 0.01
_SHORT_S = 0.01  # generation waits for it; reading a small model needs no second call
_RUNNING, _DONE = "running", "done"
_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
}
_HEADS = ("VocabParallelEmbedding", "ParallelLMHead")


class RequireKey:
    """ASGI middleware: 401 without the key, except on the probes."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._expected = b"Bearer " + os.environ["AREAL_ENGINE_KEY"].encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope["path"] in ("/health", "/ping"):
            await self._app(scope, receive, send)
            return
        presented = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(presented, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            about = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": about})
            await send({"type": "http.response.body", "body": b"the key of the service is needed"})


class Worker:
    """Mixed into vLLM's worker, called over ``/collective_rpc``. Loading returns None, or why the old weights stay."""

    def areal_load_weights(self, path: str) -> str | None:
        refusal = _refusal(self._areal_served, _of_folder(path)) if _files(path) else f"{path} holds no weights"
        if refusal is None:
            self._areal_reload(weights_path=path)
        return refusal

    def areal_join(self, name: str, host: str, port: int, rank: int, size: int) -> str:
        state = self._areal_weights

        def join(given_up: threading.Event) -> None:
            if self._areal_is_first:
                state.add_group(given_up, name, _join(host, port, rank, size, given_up))

        return state.begin(join)

    def areal_stage(self, version: int, path: str | None = None, group: str | None = None, layout: Any = None) -> str:
        """Stage weights from ``path``, or from a broadcast in ``group``: ``layout`` lists name, shape and dtype."""
        state = self._areal_weights

        def stage(given_up: threading.Event) -> None:
            new = _Folder(path) if path is not None else self._areal_received(group, layout, given_up)
            if path is not None or self._areal_is_first:
                refusal = _refusal(self._areal_served, new.tensors())
                if refusal is not None:
                    raise ValueError(refusal)
            state.stage(given_up, version, new)

        return state.begin(stage)

    def areal_state(self) -> str:
        return self._areal_weights.state()

    def areal_load_staged(self, version: int) -> str | None:
        state = self._areal_weights
        if state.staged is None or state.staged[0] != version:
            return f"version {version} is not staged here"
        (_, new), state.staged = state.staged, None
        worker: Any = self
        if isinstance(new, _Received) and worker.vllm_config.parallel_config.world_size > 1:
            new.share()
        self._areal_reload(weights_iterator=new.tensors())
        return None

    def areal_forget(self, group: str | None = None) -> None:
        """Drop staged weights and cancel a running operation; with ``group``, leave that."""
        self._areal_weights.give_up()
        if group is not None:
            self._areal_weights.leave(group)

    def _areal_received(self, name: str | None, layout: Any, given_up: threading.Event) -> _Received:
        new = _Received(layout)
        if self._areal_is_first:
            group = self._areal_weights.groups.get(name or "")
            if group is None:
                raise ValueError(f"this vLLM has not joined the group {name!r}")
            try:
                new.receive(group, given_up)
            except RuntimeError:
                self._areal_weights.leave(name or "", group)  # the rest of the broadcast would be taken for the next
                raise
        return new

    def _areal_reload(self, **what: Any) -> None:
        worker: Any = self
        worker.reload_weights(**what)
        for module in worker.model_runner.get_model().modules():
            method = getattr(module, "quant_method", None)
            if type(module).__name__ in _HEADS and method is not None:
                method.process_weights_after_loading(module)

    @property
    def _areal_served(self) -> str:
        worker: Any = self
        return str(worker.vllm_config.model_config.model)

    @property
    def _areal_is_first(self) -> bool:
        worker: Any = self
        return int(worker.rank) == 0

    @property
    def _areal_weights(self) -> _WeightState:
        return self.__dict__.setdefault("_areal_weight_state", _WeightState())


class _WeightState:
    """A worker's process groups, its staged (version, weights), and its operation. A new one cancels it."""

    def __init__(self) -> None:
        self.groups: dict[str, object] = {}
        self.staged: tuple[int, _Folder | _Received] | None = None
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._given_up = threading.Event()  # of the last operation
        self._lock = threading.Lock()

    def begin(self, work: Callable[[threading.Event], None]) -> str:
        self.give_up()
        given_up = self._given_up = threading.Event()
        self._failure = None

        def run() -> None:
            failure: str | None = None
            try:
                work(given_up)
            except Exception as error:  # noqa: BLE001 (the boundary of the thread: ``state`` reports it)
                failure = f"{error}" or repr(error)
            if given_up is self._given_up:
                self._failure = failure

        self._thread = threading.Thread(target=run, name="areal-weights", daemon=True)
        self._thread.start()
        self._thread.join(_SHORT_S)
        return self.state()

    def state(self) -> str:
        if self._given_up.is_set():
            return "failed: it was given up"
        if self._thread is not None and self._thread.is_alive():
            return _RUNNING
        return _DONE if self._failure is None else f"failed: {self._failure}"

    def give_up(self) -> None:
        """Cancel the operation and drop staged weights."""
        with self._lock:
            self._given_up.set()
            self.staged = None

    def stage(self, given_up: threading.Event, version: int, new: _Folder | _Received) -> None:
        with self._lock:
            if not given_up.is_set():
                self.staged = (version, new)

    def add_group(self, given_up: threading.Event, name: str, group: Any) -> None:
        with self._lock:
            if not given_up.is_set():
                self.groups[name] = group

    def leave(self, name: str, group: object = None) -> None:
        """Free the group of this name, unless it has replaced ``group``. It is freed in a thread, because this may take
        as long as an operation that hangs in the group."""
        with self._lock:
            replaced = group is not None and self.groups.get(name) is not group
            held = [None if replaced else self.groups.pop(name, None)]
        threading.Thread(target=held.clear, name="areal-free-group", daemon=True).start()


class _Folder:
    def __init__(self, path: str) -> None:
        if not _files(path):
            raise ValueError(f"{path} holds no *.safetensors file")
        self._path = path

    def tensors(self) -> Iterator[tuple[str, Any]]:
        return _of_folder(self._path)


class _Received:
    """Received tensors, stored one after the other in a block of host memory."""

    def __init__(self, layout: Any) -> None:
        import torch

        self._places = [(name, shape, getattr(torch, _DTYPES[dtype])) for name, shape, dtype in layout]
        size = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in self._places)
        self._body = torch.empty(size, dtype=torch.uint8)

    def receive(self, group: Any, given_up: threading.Event) -> None:
        """Raise RuntimeError if a member is lost, and soon after ``given_up`` is set."""
        import torch
        import torch.distributed as dist

        options: Any = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, _TIMEOUT
        works = [group.broadcast([piece], options) for piece in torch.split(self._body, _PIECE)]
        for work in works:
            _await(work, given_up)

    def share(self) -> None:
        """Send the weights from the first worker to the others: a collective call of all workers."""
        import torch.distributed as dist

        world = import_module("vllm.distributed.parallel_state").get_world_group()
        dist.broadcast(self._body, world.ranks[0], group=world.cpu_group)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        begin = 0
        for name, shape, dtype in self._places:
            end = begin + math.prod(shape) * dtype.itemsize
            piece = self._body[begin:end]  # copied where it is not aligned to its dtype
            yield name, (piece if begin % dtype.itemsize == 0 else piece.clone()).view(dtype).view(shape)
            begin = end


def _await(work: Any, given_up: threading.Event) -> None:
    while True:
        try:
            work.wait(_LOOK)
            return
        except RuntimeError:  # failed, or not done yet
            if given_up.is_set():
                raise RuntimeError("the broadcast was given up") from None
            if work.is_completed():
                work.wait()  # raises if it failed; it may have ended just now
                return


def _join(host: str, port: int, rank: int, size: int, given_up: threading.Event) -> Any:
    """Join the process group. Raises RuntimeError if it does not form, and at once if ``given_up`` is set."""
    import torch.distributed as dist

    distributed: Any = dist
    store = distributed.TCPStore(host, port, size, is_master=False, timeout=_CONNECT, wait_for_workers=False)
    store.set(f"device/{rank}", "cpu")  # the device that receives
    members = [f"device/{member}" for member in range(size)]
    deadline = time.monotonic() + _TIMEOUT.total_seconds()
    while not store.check(members):
        if given_up.wait(_MEET_S):
            raise RuntimeError("the process group was given up before it was formed")
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all members of the process group came within {_TIMEOUT.total_seconds():g} s")
    return distributed.ProcessGroupGloo(store, rank, size, _CONNECT)


def _files(path: str) -> list[Path]:
    return sorted(Path(path).glob("*.safetensors"))


def _of_folder(path: str) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in _files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors.get_tensor(name)


def _refusal(served: str, tensors: Iterable[tuple[str, Any]]) -> str | None:
    """Return why ``tensors`` cannot replace the served weights: other names or shapes, or values not finite."""
    import torch
    from safetensors import safe_open

    new: dict[str, list[int]] = {}
    for name, tensor in tensors:
        new[name] = list(tensor.shape)
        if tensor.is_floating_point() and tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            return f"{name} holds values that are not finite"
    if not Path(served).is_dir():  # from a hub: there is no folder to compare with
        return None
    old: dict[str, list[int]] = {}
    for file in _files(served):
        with safe_open(file, framework="np") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a mapping)
                old[name] = list(weights.get_slice(name).get_shape())
    wrong = [name for name in old if new.get(name) != old[name]] + [name for name in new if name not in old]
    if wrong:
        return f"this is not the model that is served: {wrong[0]} is {new.get(wrong[0])}, was {old.get(wrong[0])}"
    return None
