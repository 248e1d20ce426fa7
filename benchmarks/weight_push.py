"""What it costs to push new weights into a running engine, beside a raw copy of the same bytes.

    python benchmarks/weight_push.py [--megabytes 256] [--rounds 15] [--ahead] [--write]

The push is the real one: a trainer's publisher, the weight-update gateway, a data proxy, the embedded engine, each a
process of its own; from the publisher's call to its answer. The raw copy moves the same bytes by the same primitive
between the same kinds of places and does nothing else:

- disk: a file is written beside, renamed and read by another process;
- shm: copied into a memfd that is mapped already, and copied out of it by another process;
- xccl: broadcast by gloo to another process, from tensor to tensor.

Pushes and copies take turns, everything is warm. ``--ahead``: what is measured is scheduled before all other processes
while it is (SCHED_RR, for which one must be root): for a machine that has other work. Target: shm and xccl within 1.5x
of the raw copy, wall and CPU.
*Pause* is how long generation stood still. After the last push the engine's log-probabilities are compared with a plain
forward pass.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from areal.services.http.auth import load_admin_key
from areal.services.weight_transfer.group import BroadcastGroup, open_store
from areal.services.weight_transfer.memory import MemoryFile
from areal.services.weight_update.publisher import TrainerPair, serve_endpoint
from areal.services.weight_update.staging import open_publisher, probe
from areal.training.run_folder import config_files
from areal.wire.bodies import ProbeOfWeights
from benchmarks.relaying.floor import KEY, Floor, answers, cpu_us, until
from benchmarks.reporting import header, publish, table

MODES = ("disk", "shm", "xccl")
_HIDDEN, _INNER, _VOCAB, _HEADS = 1024, 2816, 8192, 16
_GOAL = 1.5
_WARM = 2  # rounds: two places in memory take turns
_OTHERS_S = 0.3  # for the others, after each turn that went before them
_EXAMPLE = REPOSITORY / "examples" / "reverse_digits" / "model"


@dataclass
class Taken:
    """Milliseconds of one arm, a round each."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        found = {"wall_ms": self.wall, "cpu_ms": self.cpu, "pause_ms": self.pause}
        middle = {name: round(statistics.median(values), 1) for name, values in found.items() if values}
        return middle | {"wall_ms_lowest": round(min(self.wall), 1), "cpu_ms_lowest": round(min(self.cpu), 1)}


def make_model(folder: Path, megabytes: int) -> torch.nn.Module:
    """A Llama of about that many megabytes of float32, with random weights and a tokenizer that fits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    a_layer = (4 * _HIDDEN * _HIDDEN + 3 * _HIDDEN * _INNER) * 4
    layers = max(1, round((megabytes * 1e6 - _VOCAB * _HIDDEN * 4) / a_layer))
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=_HIDDEN,
        intermediate_size=_INNER,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model: torch.nn.Module = LlamaForCausalLM(config).train(False)
    model.save_pretrained(folder)  # type: ignore[operator]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(_EXAMPLE / name, folder / name)
    return model


def weights_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.detach()) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]


# -- the real path


class Push:
    """One transport; ``once`` pushes what the model has now. The processes are started once for all of them."""

    def __init__(self, mode: str, pids: list[int], urls: dict[str, str], folder: Path, ahead: bool) -> None:
        self.mode, self._pids, self.taken, self._ahead = mode, pids, Taken(), ahead
        self._publisher = open_publisher(mode, folder / f"weights-{mode}", config_files(folder / "model"))
        self._stack = ExitStack()
        self._stack.callback(self._publisher.remove)
        key_file = folder / "key"
        endpoint = self._stack.enter_context(serve_endpoint({mode: self._publisher}, load_admin_key(str(key_file))))
        workers = {"inference_worker_urls": [urls["proxy"]]}
        self._pair = TrainerPair(mode, mode, urls["gateway"], endpoint, workers, self._publisher, KEY)
        self._pair.connect()
        self._stack.callback(self._pair.disconnect)

    def once(self, version: int, weights: list[tuple[str, torch.Tensor]], told: ProbeOfWeights | None = None) -> None:
        with _first(self._pids, self._ahead):
            cpu = self._cpu()
            began = time.perf_counter()
            done = self._pair.publish(version, weights, told)
            self.taken.wall.append((time.perf_counter() - began) * 1e3)
        self.taken.cpu.append((self._cpu() - cpu) / 1e3)
        self.taken.pause.append(done.paused_ms)

    def _cpu(self) -> float:
        return sum(cpu_us(pid) for pid in (*self._pids, os.getpid()))

    def close(self) -> None:
        self._stack.close()


# -- the raw copies


class Raw:
    """``send`` here and ``receive`` in a process of its own, each once a round."""

    def __init__(self, mode: str, size: int, folder: Path, ahead: bool) -> None:
        self._ahead = ahead
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._child = context.Process(target=_receiver, args=(mode, size, str(folder), there), daemon=True)
        self.taken = Taken()
        sends: dict[str, Callable[[], Callable[[torch.Tensor], None]]] = {
            "disk": lambda: _file_sender(folder),
            "shm": lambda: _memory_sender(folder, size),
            "xccl": lambda: _group_sender(self._here),
        }
        if mode == "shm":
            self._send = sends[mode]()
            self._child.start()
        else:
            self._child.start()
            self._send = sends[mode]()
        self._at_once = mode == "xccl"  # a broadcast is sent and received together
        self._here.recv()

    def once(self, body: torch.Tensor) -> None:
        pid = self._child.pid
        assert pid is not None
        with _first([pid], self._ahead):
            cpu = cpu_us(pid) + cpu_us(os.getpid())
            began = time.perf_counter()
            if self._at_once:
                self._here.send(True)
                self._send(body)
            else:
                self._send(body)
                self._here.send(True)
            self._here.recv()
            self.taken.wall.append((time.perf_counter() - began) * 1e3)
        self.taken.cpu.append((cpu_us(pid) + cpu_us(os.getpid()) - cpu) / 1e3)

    def close(self) -> None:
        self._here.send(False)
        self._child.join(20)


def _file_sender(folder: Path) -> Callable[[torch.Tensor], None]:
    def send(body: torch.Tensor) -> None:
        aside = folder / "raw.tmp"
        with aside.open("wb", buffering=0) as file:
            file.write(body.numpy().data)
        aside.rename(folder / "raw")

    return send


def _memory_sender(folder: Path, size: int) -> Callable[[torch.Tensor], None]:
    file = MemoryFile(folder / "raw-memory", size)
    there = torch.frombuffer(file.map, dtype=torch.uint8)

    def send(body: torch.Tensor) -> None:
        there.copy_(body)

    return send


def _group_sender(pipe: Connection) -> Callable[[torch.Tensor], None]:
    store = open_store("127.0.0.1", 0, 2, 60.0)
    pipe.send(store.port)
    group = BroadcastGroup(store, 0, 2, 60.0)
    return group.broadcast


def _receiver(mode: str, size: int, folder: str, pipe: Connection) -> None:
    """The other process: takes the bytes into a tensor of its own, each time it is told to."""
    torch.set_num_threads(1)
    body = torch.zeros(size, dtype=torch.uint8)
    receive: Callable[[], None]
    if mode == "disk":

        def receive() -> None:
            with (Path(folder) / "raw").open("rb", buffering=0) as file:
                file.readinto(body.numpy().data)

    elif mode == "shm":
        import mmap

        with (Path(folder) / "raw-memory").open("r+b") as opened:
            source = torch.frombuffer(mmap.mmap(opened.fileno(), size), dtype=torch.uint8)

        def receive() -> None:
            body.copy_(source)

    else:
        group = BroadcastGroup(open_store("127.0.0.1", pipe.recv(), 2, 60.0, listen=False), 1, 2, 60.0)

        def receive() -> None:
            group.broadcast(body)

    pipe.send(True)
    while pipe.recv():
        receive()
        pipe.send(True)


# -- a run


@contextmanager
def _first(pids: Iterable[int], ahead: bool) -> Iterator[None]:
    """These processes and ours before all others, where they are to be."""
    tasks = [Path(f"/proc/{pid}/task") for pid in (*pids, os.getpid())]

    def schedule(policy: int, priority: int) -> None:
        for thread in [int(path.name) for task in tasks for path in task.iterdir()] if ahead else ():
            with suppress(ProcessLookupError):
                os.sched_setscheduler(thread, policy, os.sched_param(priority))

    schedule(os.SCHED_RR, 1)
    try:
        yield
    finally:
        schedule(os.SCHED_OTHER, 0)
        if ahead:
            time.sleep(_OTHERS_S)


def start(floor: Floor, model: Path) -> tuple[list[int], dict[str, str]]:
    """Pids and addresses of the gateway, the engine and its data proxy."""
    flags = ("--model-path", str(model), "--dtype", "float32", "--threads", "1")
    engine, engine_port = floor.service("engines.embedded", *flags)
    until(lambda: answers(engine_port, "/ready") or None, "the engine to be ready")
    flags = ("--model", "m", "--engine", "embedded", "--engine-url", f"http://127.0.0.1:{engine_port}")
    proxy, proxy_port = floor.service("data_proxy", *flags, "--tokenizer-path", str(model))
    until(lambda: answers(proxy_port, "/ready") or None, "the data proxy to be ready")
    keyed = ("--port", "0", "--admin-key-file", str(floor.folder / "key"))
    module = "areal.services.weight_update"
    gateway, port = floor.start(sys.executable, "-m", module, *keyed, says=r"listens on \S+ port (\d+)")
    urls = {"gateway": f"http://127.0.0.1:{port}", "proxy": f"http://127.0.0.1:{proxy_port}"}
    return [gateway, proxy, engine], urls


@torch.no_grad()
def told_by(model: torch.nn.Module) -> ProbeOfWeights:
    ids = torch.arange(1, 9)
    return probe(torch.log_softmax(model(input_ids=ids[None]).logits[0, -1], -1), ids, tolerance=2e-3)


@torch.no_grad()
def moved_on(model: torch.nn.Module) -> None:
    """As an optimizer's step: every weight changes where it lies."""
    for parameter in model.parameters():
        parameter.mul_(0.999)


def measure(folder: Path, megabytes: int, rounds: int, ahead: bool = False) -> dict[str, Any]:
    model = make_model(folder / "model", megabytes)
    weights = weights_of(model)
    size = sum(tensor.nbytes for _, tensor in weights)
    body = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in weights])
    floor = Floor(folder)
    found: dict[str, Any] = {"bytes": size, "rounds": rounds}
    try:
        pids, urls = start(floor, folder / "model")
        version = 0
        for mode in MODES:
            push, raw = Push(mode, pids, urls, folder, ahead), Raw(mode, size, folder, ahead)
            for number in range(rounds + _WARM):
                version += 1
                moved_on(model)
                raw.once(body)
                push.once(version, weights)
                if number == _WARM - 1:  # maps, buffers and connections are there from now on
                    push.taken, raw.taken = Taken(), Taken()
            found[mode] = row(push.taken, raw.taken)
            version += 1
            push.once(version, weights, told_by(model))
            push.close()
            raw.close()
    finally:
        floor.close()
    return found


def row(push: Taken, raw: Taken) -> dict[str, Any]:
    ours, theirs = push.medians(), raw.medians()
    ratios = sorted(one / other for one, other in zip(push.wall, raw.wall, strict=True))
    return {
        "push": ours,
        "raw": theirs,
        "wall_ratio": round(statistics.median(ratios), 2),
        "wall_ratio_lowest": round(ours["wall_ms_lowest"] / theirs["wall_ms_lowest"], 2),
        "cpu_ratio": round(ours["cpu_ms"] / theirs["cpu_ms"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ahead", action="store_true", help="before all other processes of this machine (as root)")
    parser.add_argument("--write", action="store_true", help="keep the results in benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        found = {
            **header("weight_push", torch=torch.__version__),
            **measure(Path(name), options.megabytes, options.rounds, options.ahead),
            "ahead": options.ahead,
        }
    columns = ("transport", "push ms", "raw ms", "ratio", "CPU ms", "raw CPU ms", "ratio", "pause ms", "target")
    rows = []
    for mode in MODES:
        push, raw = found[mode]["push"], found[mode]["raw"]
        ratios = f"{found[mode]['wall_ratio']}x", f"{found[mode]['cpu_ratio']}x"
        times = push["wall_ms"], raw["wall_ms"], ratios[0], push["cpu_ms"], raw["cpu_ms"], ratios[1], push["pause_ms"]
        rows.append((mode, *times, "" if mode == "disk" else f"{_GOAL}x"))
    how = ", scheduled before the machine's other work" if options.ahead else ""
    said = f"{found['bytes'] / 1e6:.0f} MB of float32, {found['rounds']} rounds, medians{how}"
    text = f"{said}\n\n{table(columns, rows)}"
    publish(found, text, options.write)


if __name__ == "__main__":
    main()
