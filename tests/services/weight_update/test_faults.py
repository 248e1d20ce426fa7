"""Who may die in the middle of an update, and what is served then: never half of anything."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from areal.http.client import HttpClient
from areal.services.http.errors import ApiError
from areal.services.weight_update.pairs import Mode, Pair
from areal.services.weight_update.publisher import WeightUpdateFailed
from areal.services.weight_update.staging import FolderPublisher
from areal.services.weight_update.updating import Updater, WorkerClient
from areal.wire.bodies import PublishedVersion
from tests.services.processes import Process
from tests.services.weight_update.conftest import PROMPT, Side, logprobs_of, model, probe_of, weights

Build = Callable[[int], Side]


@pytest.mark.slow
def test_engine_death_during_broadcast_is_named_in_error(side: Build) -> None:
    here = side(2)
    pair = here.pair("xccl")
    pair.connect()
    pair.publish(1, weights(model(1)))
    send = pair.publisher.send

    def after_a_death(version: int) -> None:
        here.engines[1].kill()
        send(version)

    pair.publisher.send = after_a_death  # type: ignore[method-assign]
    with pytest.raises(WeightUpdateFailed, match="update failed: "):
        pair.publish(2, weights(model(2)))
    assert here.pairs()[0]["state"] == "failed"
    assert served(here, here.proxies[0]) == pytest.approx(expected(model(1)), abs=1e-3)
    assert version(here, here.proxies[0]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "when"), [("disk", "writing"), ("xccl", "sending"), ("shm", "writing")])
def test_killed_trainer_leaves_old_version_and_next_continues(
    side: Build, tmp_path: Path, mode: str, when: str
) -> None:
    here = side(1)
    proxy = here.proxies[0]
    place = tmp_path / "run"
    place.mkdir()
    argv = (str(place), mode, str(here.processes.key_file), proxy.url, when)
    trainer = here.processes.spawn("-m", "tests.services.weight_update.trainer_process", *argv)
    trainer.wait_log("published 1")
    assert trainer.wait(60) == -signal.SIGKILL
    assert served(here, proxy) == pytest.approx(expected(model(1)), abs=1e-3)
    assert version(here, proxy) == 1
    pair = here.pair(mode, name="actor", folder=place / "weights")
    pair.connect()
    assert [path.name for path in (place / "weights").glob("*.tmp")] == []
    new = model(3)
    pair.publish(3, weights(new), probe_of(new))
    assert version(here, proxy) == 3


@pytest.mark.extended
def test_unrecordable_version_is_an_error_until_recorded(side: Build, tmp_path: Path) -> None:
    here = side(1)
    proxy = here.proxies[0]
    pair = here.pair("disk")
    pair.connect()
    pair.publish(1, weights(model(1)))
    record = next(tmp_path.glob("journal-0/**/published.json"))
    record.unlink()
    (record / "in the way").mkdir(parents=True)
    with pytest.raises(WeightUpdateFailed, match="the record of the published weights cannot be written: "):
        pair.publish(2, weights(model(2)))
    assert "Is a directory" in proxy.call("GET", "/ready").json()["weights_not_kept"]
    (record / "in the way").rmdir()
    record.rmdir()
    pair.publish(3, weights(model(3)))
    assert proxy.call("GET", "/ready").json()["weights_not_kept"] is None


@pytest.mark.extended
def test_failed_weight_copy_keeps_old_weights_serving(side: Build) -> None:
    """Half of them is travelling by then."""
    here = side(1)
    pair = here.pair("xccl")
    pair.connect()
    pair.publish(1, weights(model(1)))
    half = weights(model(2))
    half[len(half) // 2 :] = [(name, tensor.to("meta")) for name, tensor in half[len(half) // 2 :]]
    with pytest.raises(NotImplementedError, match="meta tensor"):
        pair.publish(2, half)
    assert served(here, here.proxies[0]) == pytest.approx(expected(model(1)), abs=1e-3)
    assert version(here, here.proxies[0]) == 1
    assert pair.publisher.staged_file(2) is None
    new = model(3)
    pair.publish(3, weights(new), probe_of(new))
    assert here.versions() == [3]


@pytest.mark.extended
def test_gateway_killed_mid_update_does_not_stop_generation(side: Build) -> None:
    here = side(1)
    pair = here.pair("shm")
    pair.connect()
    pair.publish(1, weights(model(1)))
    published = pair.publisher.published

    def after_a_death(version: int) -> PublishedVersion:
        here.gateway.kill()
        return published(version)

    pair.publisher.published = after_a_death  # type: ignore[method-assign]
    with pytest.raises(WeightUpdateFailed, match="does not answer"):
        pair.publish(2, weights(model(2)))
    assert served(here, here.proxies[0]) == pytest.approx(expected(model(1)), abs=1e-3)
    pair.disconnect()  # there is no worker to disconnect
    here.gateway = here.processes.service("weight_update")
    again = here.pair("shm")
    again.connect()
    new = model(3)
    again.publish(3, weights(new), probe_of(new))
    assert here.versions() == [3]


@pytest.mark.extended
def test_disconnect_leaves_workers_their_weights(side: Build) -> None:
    here = side(1)
    pair = here.pair("shm")
    pair.connect()
    for number in (1, 2, 3):
        pair.publish(number, weights(model(number)))
    assert known_pairs(here) == ["actor"]
    maps = Path(f"/proc/{here.engines[0].popen.pid}/maps")
    mapped = lambda: sum("memfd:areal-model.safetensors" in line for line in maps.read_text().splitlines())  # noqa: E731
    assert mapped() == 2
    pair.disconnect()
    assert known_pairs(here) == []
    assert mapped() == 1
    pair.publisher.remove()
    assert served(here, here.proxies[0]) == pytest.approx(expected(model(3)), abs=1e-3)


async def test_silent_worker_is_an_error_after_deadline() -> None:
    quiet = threading.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.to_thread(quiet.wait, 20)
        writer.close()

    server = await asyncio.start_server(never, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pair = Pair("actor", Mode.DISK, (url,), (url,))
    try:
        async with HttpClient() as http:
            with pytest.raises(ApiError, match=rf"connect failed: {url}/weights/connect does not answer"):
                await Updater(WorkerClient(http, {}, control_s=0.2)).connect(pair)
    finally:
        quiet.set()
        server.close()


def test_folders_of_a_killed_trainer_are_cleared(tmp_path: Path) -> None:
    (tmp_path / "v7.tmp").mkdir()
    (tmp_path / "v7.tmp" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "mark-1").write_text("another")
    (tmp_path / "v6").mkdir()
    offered = FolderPublisher(tmp_path, in_memory=False).offer()
    assert sorted(path.name for path in tmp_path.iterdir()) == [offered["mark"], "v6"]


def served(here: Side, proxy: Process) -> list[float]:
    """The log-probabilities of "4321" after the prompt, as the worker has them."""
    body = {"model": "m", "messages": [{"role": "user", "content": "1234"}], "max_tokens": 4, "logprobs": True}
    body |= {"temperature": 0, "logit_bias": {"2": -100}}
    answer = proxy.call("POST", "/v1/chat/completions", body, key=here.processes.key)
    assert answer.status == 200, answer.body
    return [entry["logprob"] for entry in answer.json()["choices"][0]["logprobs"]["content"]]


@torch.no_grad()
def expected(of: torch.nn.Module) -> list[float]:
    tokens = list(PROMPT)
    for _ in range(4):
        logits = of(input_ids=torch.tensor([tokens])).logits[0, -1]
        logits[2] = -torch.inf
        tokens.append(int(logits.argmax()))
    return logprobs_of(of, tokens)[len(PROMPT) - 1 :].tolist()


def version(here: Side, proxy: Process) -> int:
    found: int = proxy.call("GET", "/get_version", key=here.processes.key).json()["version"]
    return found


def known_pairs(here: Side) -> list[str]:
    found: list[str] = here.proxies[0].call("GET", "/weights/pairs", key=here.processes.key).json()["pairs"]
    return found
