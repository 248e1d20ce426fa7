"""Workers that start while weights are published: they have them before they serve, whoever is still there."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal.cli.main import run
from areal.services.weight_update.publisher import TrainerPair
from areal.services.weight_update.staging import copy_model
from areal.wire.bodies import PublishedVersion
from tests.services.processes import Process, Processes, wait_ready, wait_until
from tests.services.weight_update.conftest import MODEL, Side, embedded_worker, model, probe_of, weights

Build = Callable[[int], Side]
_SLOW = pytest.mark.slow
MODES = ["shm", pytest.param("disk", marks=_SLOW), pytest.param("xccl", marks=_SLOW)]


@dataclass
class Served:
    """One model at a gateway, and its trainer's pair. All workers have one folder, as those of a Model have."""

    here: Side
    front: Process
    router: Process
    pair: TrainerPair
    state: Path

    def start(self) -> tuple[Process, Process]:
        """A worker more, which need not be ready."""
        processes = self.here.processes
        engine = processes.service("engines.embedded", "--model-path", str(MODEL), "--dtype", "float32")
        flags = ("--model", "m", "--engine", "embedded", "--engine-url", engine.url, "--tokenizer-path", str(MODEL))
        kept = ("--state-dir", str(self.state), "--model-path", str(MODEL))
        return engine, processes.service("data_proxy", *flags, *kept)

    def publish(self, version: int, seed: int) -> None:
        new = model(seed)
        self.pair.publish(version, weights(new), probe_of(new))

    def version(self, proxy: Process) -> int:
        version: int = proxy.call("GET", "/get_version", key=self.here.processes.key).json()["version"]
        return version


@pytest.fixture
def served(processes: Processes, side: Build, tmp_path: Path) -> Callable[[str], Served]:
    """``served("shm")``: one worker serves, which has the weights of version 3."""

    def build(mode: str) -> Served:
        here, state = side(0), tmp_path / "state"
        kept = ("--state-dir", str(state), "--model-path", str(MODEL))
        engine, proxy = embedded_worker(processes, *kept)
        here.engines.append(engine)
        here.proxies.append(proxy)
        router = processes.router()
        front = processes.gateway(router)
        processes.register(router, proxy, model="m")
        pair = here.pair(mode, inference={"inference_gateway_url": front.url, "model": "m"})
        pair.connect()
        found = Served(here, front, router, pair, state)
        found.publish(3, seed=5)
        return found

    return build


def ready(proxy: Process) -> bool:
    return proxy.call("GET", "/ready").status == 200


def never_serves_older(at: Served, proxy: Process, version: int) -> None:
    """From the first moment that it is ready, it has ``version``; before, it refuses calls."""
    body = {"model": "m", "messages": [{"role": "user", "content": "1234"}], "max_tokens": 2}

    def is_ready() -> bool:
        before = proxy.call("POST", "/v1/chat/completions", body, key=at.here.processes.key)
        if ready(proxy):
            return True
        assert before.status == 503, before.body
        return False

    wait_until(is_ready, 60, "the worker is ready")
    assert at.version(proxy) == version


@pytest.mark.extended
@pytest.mark.parametrize("mode", MODES)
def test_starting_worker_loads_published_version_before_ready(served: Callable[[str], Served], mode: str) -> None:
    at = served(mode)
    _, proxy = at.start()
    never_serves_older(at, proxy, 3)
    assert at.here.greedy(proxy) == at.here.greedy(at.here.proxies[0])
    at.here.processes.register(at.router, at.here.proxies[0], proxy, model="m")
    both = [{"url": each.url, "state": "ready", "version": 3} for each in (at.here.proxies[0], proxy)]
    wait_until(lambda: at.here.pairs()[0]["inference_workers"] == both)  # before any update took it along
    at.publish(4, seed=6)
    assert [at.version(each) for each in (at.here.proxies[0], proxy)] == [4, 4]
    proxy.kill()
    wait_until(lambda: [each["state"] for each in at.here.pairs()[0]["inference_workers"]] == ["ready", "dead"])


@pytest.mark.slow
def test_restarted_engine_loads_published_version(served: Callable[[str], Served]) -> None:
    at = served("shm")
    proxy, engine = at.here.proxies[0], at.here.engines[0]
    answer = at.here.greedy(proxy)
    engine.kill()
    wait_until(lambda: not ready(proxy), what="the loss is seen")
    flags = ("--model-path", str(MODEL), "--dtype", "float32", "--port", str(engine.port))
    at.here.processes.service("engines.embedded", *flags)
    never_serves_older(at, proxy, 3)
    assert at.here.greedy(proxy) == answer


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_update_succeeds_without_lost_engine_which_catches_up(served: Callable[[str], Served], mode: str) -> None:
    at = served(mode)
    engine, proxy = at.start()
    wait_until(lambda: ready(proxy), 60, "it has joined")
    at.here.processes.register(at.router, at.here.proxies[0], proxy, model="m")
    engine.kill()
    at.publish(4, seed=6)  # the router may not know of it yet
    assert at.version(at.here.proxies[0]) == 4
    flags = ("--model-path", str(MODEL), "--dtype", "float32", "--port", str(engine.port))
    at.here.processes.service("engines.embedded", *flags)
    never_serves_older(at, proxy, 4)


@pytest.mark.extended
@pytest.mark.parametrize("which", ["data proxy", pytest.param("engine", marks=_SLOW)])
def test_update_is_repeated_when_worker_restarts_between_steps(
    served: Callable[[str], Served], which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = served("shm")
    proxy, engine = at.here.proxies[0], at.here.engines[0]
    published = at.pair.publisher.published
    restarts: list[int] = []

    def after_a_restart(version: int) -> PublishedVersion:
        found = published(version)
        if not restarts:
            restarts.append(version)
            if which == "engine":
                engine.kill()
                flags = ("--model-path", str(MODEL), "--dtype", "float32", "--port", str(engine.port))
                wait_ready(at.here.processes.service("engines.embedded", *flags))
            else:
                proxy.kill()
                flags = ("--model", "m", "--engine", "embedded", "--engine-url", engine.url)
                kept = ("--tokenizer-path", str(MODEL), "--state-dir", str(at.state), "--model-path", str(MODEL))
                again = at.here.processes.service("data_proxy", *flags, *kept, "--port", str(proxy.port))
                wait_until(lambda: again.call("GET", "/health").status == 200, 60, "it answers again")
        return found

    monkeypatch.setattr(at.pair.publisher, "published", after_a_restart)
    new = model(6)
    at.pair.stage(4, weights(new), probe_of(new))
    at.here.post("/force_sync", {"pair_name": at.pair.name})  # an update that asks the trainer between its steps
    assert restarts == [4]
    assert at.version(proxy) == 4
    assert at.here.pairs()[0]["state"] == "connected"


@_SLOW
def test_update_waits_for_killed_only_data_proxy(
    served: Callable[[str], Served],
) -> None:
    at = served("shm")
    proxy = at.here.proxies[0]
    proxy.kill()
    key = at.here.processes.key
    dead = lambda: at.front.call("GET", "/workers", key=key).json()["workers"][0]["state"] == "dead"  # noqa: E731
    wait_until(dead, what="the router knows")
    new = model(6)
    at.pair.stage(4, weights(new), probe_of(new))
    engine = at.here.engines[0]
    flags = ("--model", "m", "--engine", "embedded", "--engine-url", engine.url, "--tokenizer-path", str(MODEL))
    kept = ("--state-dir", str(at.state), "--model-path", str(MODEL), "--port", str(proxy.port))
    at.here.processes.service("data_proxy", *flags, *kept)
    at.pair.deliver(4)
    assert at.version(proxy) == 4


@_SLOW
def test_worker_started_after_trainer_serves_its_last_version(served: Callable[[str], Served]) -> None:
    at = served("shm")
    answer = at.here.greedy(at.here.proxies[0])
    file = at.pair.publisher.staged_file(3)
    assert file is not None
    copy_model(file, (), at.here.folder / "served")
    at.pair.disconnect(at.here.folder / "served")
    at.here.gateway.kill()
    at.pair.publisher.remove()
    _, proxy = at.start()
    never_serves_older(at, proxy, 3)
    assert at.here.greedy(proxy) == answer
    shutil.rmtree(at.here.folder / "served")
    _, proxy = at.start()
    never_serves_older(at, proxy, 0)


@_SLOW
def test_worker_after_killed_trainer_uses_its_folder_or_waits(
    served: Callable[[str], Served],
) -> None:
    at = served("disk")
    at.here.gateway.kill()
    _, proxy = at.start()
    never_serves_older(at, proxy, 3)

    record = json.loads((at.state / "published.json").read_text())
    gone = {**record, "path": None, "version": 8}  # as of a trainer whose weights lay in its memory
    (at.state / "published.json").write_text(json.dumps(gone))
    wait_until(lambda: not ready(proxy), what="it is behind")
    proxy.wait_log(r"not serving: version 8 .* does not answer")
    wait_until(lambda: "areal weight-update release --model m" in str(proxy.call("GET", "/ready").json()["reason"]))
    with contextlib.redirect_stdout(out := io.StringIO()):
        remote = ("--gateway", at.front.url, "--api-key-file", str(at.here.processes.key_file))
        assert run(["weight-update", "release", "--model", "m", *remote]) == 0
    assert "model/m released" in out.getvalue()
    assert not (at.state / "published.json").exists()
    wait_until(lambda: ready(proxy), what="it serves again")


@_SLOW
def test_release_is_refused_while_trainer_lives(served: Callable[[str], Served]) -> None:
    at = served("shm")
    remote = ("--gateway", at.front.url, "--api-key-file", str(at.here.processes.key_file))
    with contextlib.redirect_stderr(stderr := io.StringIO()):
        assert run(["weight-update", "release", "--model", "m", *remote]) == 1
        assert run(["weight-update", "release", "--model", "another", *remote]) == 4
    assert "stop it first" in stderr.getvalue() and "no worker of the model 'another'" in stderr.getvalue()
    at.publish(4, seed=6)
    assert at.version(at.here.proxies[0]) == 4


@_SLOW
def test_worker_of_another_base_model_serves_its_own_weights(served: Callable[[str], Served]) -> None:
    at = served("disk")
    record = json.loads((at.state / "published.json").read_text())
    (at.state / "published.json").write_text(json.dumps({**record, "base": "another"}))
    _, proxy = at.start()
    never_serves_older(at, proxy, 0)


@_SLOW
def test_workers_serve_their_own_weights_after_disconnect(served: Callable[[str], Served]) -> None:
    at = served("shm")
    at.pair.disconnect()
    assert not (at.state / "published.json").exists()
    _, proxy = at.start()
    never_serves_older(at, proxy, 0)
