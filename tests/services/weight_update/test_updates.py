"""New weights in running engines, compared with plain forward passes; and what goes wrong on the way."""

import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.services.weight_update.publisher import WeightUpdateFailed
from tests.services.processes import Stream, call, wait_until
from tests.services.weight_update.conftest import (
    MODEL,
    PROMPT,
    Side,
    embedded_worker,
    logprobs_of,
    model,
    probe_of,
    weights,
)

Build = Callable[[int], Side]


@pytest.mark.parametrize(
    "mode",
    [pytest.param("disk", marks=pytest.mark.slow), "shm", pytest.param("xccl", marks=pytest.mark.extended)],
)
def test_every_worker_computes_with_updated_weights(side: Build, mode: str) -> None:
    here = side(2)
    pair = here.pair(mode)
    pair.connect()
    before = [here.greedy(proxy) for proxy in here.proxies]
    for version, seed in ((1, 5), (2, 6), (5, 7)):
        new = model(seed)
        done = pair.publish(version, weights(new), probe_of(new))
        assert done.version == version
        assert done.bytes == sum(tensor.nbytes for _, tensor in weights(new))
        assert here.versions() == [version, version]
    assert [here.greedy(proxy) for proxy in here.proxies] != before
    (listed,) = here.pairs()
    assert (listed["version"], listed["state"], listed["error"]) == (5, "connected", None)
    pair.disconnect()
    assert here.pairs() == []


@pytest.mark.extended
def test_only_worker_serves_weights_of_one_call(side: Build) -> None:
    here = side(1)
    pair, (proxy,), key = here.pair("shm"), here.proxies, here.processes.key
    pair.connect()
    new = model(5)
    pair.publish(1, weights(new), probe_of(new))  # a probe is checked before the commit
    pair.publish(2, weights(new := model(6)))
    pair.publish(3, weights(new := model(7)))
    assert here.versions() == [3]
    assert proxy.call("POST", "/weights/check", {"probe": probe_of(new)}, key=key).status == 200
    order = {"pair_name": "actor", "version": 4, "source": {"path": "/"}, "gateway": "http://127.0.0.1:1"}
    assert proxy.call("POST", "/weights/replace", order, key=key).json()["error"]["code"] == "pair_not_found"
    proxy.call("POST", "/weights/disconnect", {"pair_name": "actor"}, key=key)
    pair.publish(4, weights(new), probe_of(new))  # such a worker is connected again
    assert here.versions() == [4]


@pytest.mark.extended
def test_update_during_streams_stamps_each_token(side: Build) -> None:
    here = side(1)
    pair = here.pair("shm")
    pair.connect()
    key, proxy = here.processes.key, here.proxies[0]
    pair.publish(1, weights(old := AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)))
    started = call(proxy.port, "POST", "/rl/start_session", {"task_id": "t", "group_size": 16}, key=key).json()
    sessions = started["sessions"]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "1234"}],
        "max_tokens": 110,
        "logit_bias": {"2": -100},  # never the end
    }
    pair.stage(2, weights(new := model(9)), probe_of(new))
    streams = [Stream(proxy.port, "/v1/chat/completions", body, s["session_api_key"]) for s in sessions]
    seen: list[list[object]] = [[] for _ in streams]
    many = threading.Event()

    def read(number: int) -> None:
        for event in streams[number].events():
            seen[number].append(event)
            if min(map(len, seen)) >= 2:
                many.set()

    readers = [threading.Thread(target=read, args=(number,), name=f"reader-{number}") for number in range(16)]
    for reader in readers:
        reader.start()
    assert many.wait(60)
    proxy.call("POST", "/pause_generation", key=key)
    pair.deliver(2)
    assert proxy.call("GET", "/ready").json()["paused"]  # by us, so it is ours to end
    proxy.call("POST", "/continue_generation", key=key)
    for reader in readers:
        reader.join(60)
    assert [events[-1] for events in seen] == ["[DONE]"] * 16

    for session in sessions:
        call(proxy.port, "POST", "/rl/set_reward", {"reward": 1.0}, key=session["session_api_key"])
    ids = [session["session_id"] for session in sessions]
    traj = call(proxy.port, "POST", "/export_trajectories", {"session_ids": ids}, key=key).json()["traj"]
    swapped = 0
    for row in range(16):
        length = sum(traj["attention_mask"][row])
        tokens, versions = traj["input_ids"][row][:length], traj["versions"][row][:length]
        sampled = versions[len(PROMPT) :]
        assert length == len(PROMPT) + 110
        assert set(sampled) <= {1, 2}
        assert sampled == sorted(sampled)
        swapped += 2 in sampled
        reported = torch.tensor(traj["logprobs"][row][:length])
        by_version = {1: logprobs_of(old.eval(), tokens), 2: logprobs_of(new, tokens)}
        for place in range(len(PROMPT), length):
            assert abs(reported[place] - by_version[versions[place]][place - 1]) < 1e-3, (row, place)
    assert swapped  # all of them on a quiet machine; how many had ended by then is the machine's


@pytest.mark.extended
def test_update_refused_by_engine_keeps_old_weights(side: Build, tmp_path: Path) -> None:
    here = side(1)
    pair = here.pair("disk")
    pair.connect()
    before = here.greedy(here.proxies[0])
    short = [(name, tensor) for name, tensor in weights(model(5)) if "layers.1" not in name]
    with pytest.raises(WeightUpdateFailed, match=r"update failed: .*/weights/prepare answered 400: .*layers\.1"):
        pair.publish(1, short)
    assert here.greedy(here.proxies[0]) == before
    assert here.pairs()[0]["state"] == "failed"
    new = model(6)
    pair.publish(2, weights(new), probe_of(new))  # and the next one may succeed
    assert here.pairs()[0]["state"] == "connected"
    refused, taken = map(json.loads, (tmp_path / "weight_updates.jsonl").read_text().splitlines())
    (replica,) = taken["replicas"]
    assert (refused["version"], refused["replicas"]) == (1, {replica: None}) and "layers.1" in refused["error"]
    assert (taken["version"], taken["error"], taken["joined"]) == (2, None, False) and taken["replicas"][replica] > 0
    assert refused["began"] <= refused["at"] <= taken["began"] <= taken["at"] and taken["bytes"] > 0


@pytest.mark.extended
def test_update_with_mismatched_weights_is_an_error(side: Build) -> None:
    here = side(1)
    pair = here.pair("disk")
    pair.connect()
    with pytest.raises(WeightUpdateFailed, match="does not compute with the weights it was given"):
        pair.publish(1, weights(model(5)), probe_of(model(6)))


@pytest.mark.slow
def test_update_unsupported_by_one_engine_leaves_one_version(side: Build, tmp_path: Path) -> None:
    """The second engine has less precision than the trainer asks for: it takes the weights, and is found out."""
    here = side(0)
    for number, dtype in enumerate(("float32", "bfloat16")):
        state = ("--state-dir", str(tmp_path / f"journal-{number}"), "--model-path", str(MODEL))
        engine, proxy = embedded_worker(here.processes, *state, dtype=dtype)
        here.engines.append(engine)
        here.proxies.append(proxy)
    pair = here.pair("disk")
    pair.connect()
    exact, rough = (proxy.url for proxy in here.proxies)

    def reported() -> dict[str, tuple[str, int]]:
        return {each["url"]: (each["state"], each["version"]) for each in here.pairs()[0]["inference_workers"]}

    for wrong, right in ((1, 2), (3, 4)):
        before, version = [here.greedy(proxy) for proxy in here.proxies], here.versions()[0]
        with pytest.raises(WeightUpdateFailed, match=f"{rough}.* does not compute with the weights"):
            pair.publish(wrong, weights(model(wrong)), probe_of(model(wrong)))
        there = {exact: ("ready", version), rough: ("ready", version)}
        wait_until(lambda: reported() == there, what="one version")  # noqa: B023
        assert here.versions() == [version, version]
        assert [here.greedy(proxy) for proxy in here.proxies] == before
        pair.publish(right, weights(model(right)))
        assert reported() == {exact: ("ready", right), rough: ("ready", right)}

    held = here.engines[1].popen
    held.send_signal(signal.SIGSTOP)
    try:
        update = threading.Thread(target=pair.publish, args=(5, weights(model(5))), name="update")
        update.start()
        wait_until(lambda: here.pairs()[0]["state"] == "updating", what="the update")
        exact_proxy, key = here.proxies[0], here.processes.key
        assert exact_proxy.call("GET", "/get_version", key=key).json()["version"] == 4, "the other is not ready"
    finally:
        held.send_signal(signal.SIGCONT)
    update.join(60)
    assert here.versions() == [5, 5]


@pytest.mark.extended
def test_update_with_dead_worker_is_an_error_for_it_only(side: Build) -> None:
    here = side(2)
    pair = here.pair("disk")
    pair.connect()
    here.proxies[1].kill()
    with pytest.raises(WeightUpdateFailed, match="does not answer"):
        pair.publish(1, weights(model(5)))
    assert here.greedy(here.proxies[0])  # not held still


@pytest.mark.extended
def test_concurrent_updates_are_serialised_and_versions_grow(side: Build) -> None:
    here = side(1)
    pair = here.pair("disk")
    pair.connect()
    for version in (1, 2):
        pair.stage(version, weights(model(version)))
    answers = {}

    def deliver(version: int) -> None:
        answers[version] = here.post("/update_weights", {"pair_name": "actor", "version": version})

    threads = [threading.Thread(target=deliver, args=(version,), name=f"deliver-{version}") for version in (2, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    late = here.post("/update_weights", {"pair_name": "actor", "version": 2})
    assert late.status == 409
    assert "is at version 2: the next must be above it" in late.json()["error"]["message"]
    assert here.versions() == [2]


@pytest.mark.extended
@pytest.mark.parametrize("mode", ["shm", pytest.param("xccl", marks=pytest.mark.slow)])
def test_sync_delivers_staged_version_once(side: Build, mode: str) -> None:
    here = side(1)
    pair = here.pair(mode)
    pair.connect()
    pair.publish(1, weights(model(5)))
    pair.stage(2, weights(new := model(6)), probe_of(new))
    result = here.post("/force_sync", {"pair_name": "actor"})
    assert (result.status, result.json()["version"], here.versions()) == (200, 2, [2])
    assert here.post("/force_sync", {"pair_name": "actor"}).status == 200  # it carries over nothing more
    done = pair.deliver(2)
    assert (done.version, done.bytes) == (2, result.json()["bytes"])
    with pytest.raises(WeightUpdateFailed, match="is at version 2: the next must be above it"):
        pair.deliver(2)
    pair.publish(3, weights(model(7)))

    over = threading.Event()
    answers: list[tuple[int, bytes]] = []

    def sync() -> None:
        while not over.is_set():
            answer = here.post("/force_sync", {"pair_name": "actor"})
            answers.append((answer.status, b"" if answer.status == 200 else answer.body))

    syncing = threading.Thread(target=sync, name="sync")
    syncing.start()
    try:
        for version in range(4, 40):
            pair.publish(version, weights(model(version)))
    finally:
        over.set()
        syncing.join()
    assert set(answers) == {(200, b"")}
    assert here.versions() == [39]


@pytest.mark.extended
def test_connect_is_refused_for_worker_on_other_disk(side: Build) -> None:
    here = side(1)
    pair = here.pair("disk")
    offer = pair.publisher.offer
    pair.publisher.offer = lambda *about: {**offer(*about), "word": "another"}  # type: ignore[method-assign]
    with pytest.raises(WeightUpdateFailed, match="is another folder here than on the training side"):
        pair.connect()
    assert here.pairs() == []
    pair.publisher.offer = offer  # type: ignore[method-assign]
    pair.connect()


@pytest.mark.extended
@pytest.mark.parametrize("mode", [pytest.param("disk", marks=pytest.mark.slow), "xccl"])
def test_connect_of_second_trainer_is_refused_while_first_lives(side: Build, mode: str) -> None:
    here = side(1)
    first = here.pair(mode)
    first.connect()
    others_gateway = here.processes.service("weight_update")
    second = replace(here.pair(mode, folder=here.folder / "second"), gateway=others_gateway.url)
    for version in (1, 2):  # also before the first one has published
        with pytest.raises(WeightUpdateFailed, match="already trains this model, at"):
            second.connect()
        first.publish(version, weights(model(version)))
    assert here.versions() == [2]
    here.gateway.kill()
    second.connect()
    second.publish(3, weights(model(3)))
    assert here.versions() == [3]


@pytest.mark.extended
def test_connect_through_gateway_follows_worker_changes(side: Build) -> None:
    here = side(2)
    router = here.processes.router()
    front = here.processes.gateway(router)
    here.processes.register(router, here.proxies[0], model="m")
    pair = here.pair("disk", inference={"inference_gateway_url": front.url, "model": "m"})
    pair.connect()
    pair.publish(1, weights(model(1)))
    assert here.versions() == [1, 0]
    here.processes.register(router, *here.proxies, model="m")
    key = here.processes.key
    wait_until(
        lambda: [w["state"] for w in front.call("GET", "/workers", key=key).json()["workers"]] == ["ready", "ready"]
    )
    new = model(2)
    pair.publish(2, weights(new), probe_of(new))
    assert here.versions() == [2, 2]
    both = here.processes.registration(*here.proxies, model="m", expected=None)
    both["workers"][0]["cordoned"] = True  # it still answers the sessions that it has
    assert router.call("POST", "/register_model", both, key=key).status == 200
    pair.publish(3, weights(model(3)))
    assert here.versions() == [3, 3]
    here.processes.register(router, here.proxies[1], model="m")
    here.proxies[0].kill()
    wait_until(lambda: len(front.call("GET", "/workers", key=key).json()["workers"]) == 1)
    pair.publish(4, weights(model(4)))


@pytest.mark.extended
def test_update_connects_worker_missed_by_new_trainer(side: Build) -> None:
    here = side(2)
    router = here.processes.router()
    front = here.processes.gateway(router)
    here.processes.register(router, *here.proxies, model="m")
    inference = {"inference_gateway_url": front.url, "model": "m"}
    first = here.pair("disk", inference=inference)
    first.connect()
    first.publish(1, weights(model(1)))
    here.gateway.kill()  # as of a trainer that was killed: it disconnects no worker
    here.processes.register(router, here.proxies[0], model="m")
    others_gateway = here.processes.service("weight_update")
    second = replace(here.pair("disk", inference=inference, folder=here.folder / "second"), gateway=others_gateway.url)
    second.connect()
    here.processes.register(router, *here.proxies, model="m")
    second.publish(2, weights(model(2)))
    assert here.versions() == [2, 2]


@pytest.mark.slow
def test_broadcast_regroups_without_lost_worker(side: Build) -> None:
    here = side(2)
    router = here.processes.router()
    front = here.processes.gateway(router)
    here.processes.register(router, *here.proxies, model="m")
    pair = here.pair("xccl", inference={"inference_gateway_url": front.url, "model": "m"})
    pair.connect()
    pair.publish(1, weights(model(1)))
    here.engines[1].kill()
    for version in (2, 3):
        new = model(version)
        pair.publish(version, weights(new), probe_of(new))
        got = here.proxies[0].call("GET", "/get_version", key=here.processes.key).json()["version"]
        assert got == version


@pytest.mark.slow
@pytest.mark.parametrize("engine_too", [True, False], ids=["engine-and-proxy", "proxy"])
@pytest.mark.parametrize("when", ["join", "send"])
def test_broadcast_continues_when_worker_is_killed(side: Build, when: str, engine_too: bool) -> None:
    """With the data proxy alone killed its engine stays in the group, and hears of nothing."""
    here = side(3)
    router = here.processes.router()
    front = here.processes.gateway(router)
    here.processes.register(router, *here.proxies, model="m")
    pair = here.pair("xccl", inference={"inference_gateway_url": front.url, "model": "m"})
    pair.connect()
    pair.publish(1, weights(model(1)))
    step = getattr(pair.publisher, when)
    deaths = [here.proxies[2], *([here.engines[2]] if engine_too else [])]
    if when == "join":  # so that a group has to be formed
        here.engines[1].kill()

    def after_a_death(*about: int) -> None:
        while deaths:
            deaths.pop().kill()
        step(*about)

    setattr(pair.publisher, when, after_a_death)
    began = time.monotonic()
    for version in (2, 3):
        new = model(version)
        pair.publish(version, weights(new), probe_of(new))
    assert time.monotonic() - began < 90  # of a busy machine; who waits for a dead member waits 300 s
    key = here.processes.key
    assert here.proxies[0].call("GET", "/get_version", key=key).json()["version"] == 3
