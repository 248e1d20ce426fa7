"""The other engines behind the same path: stand-ins that speak vLLM's and SGLang's routes, and really compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from areal.services.weight_update.publisher import WeightUpdateFailed
from tests.services.processes import Process, Processes, wait_ready, wait_until
from tests.services.weight_update.conftest import MODEL, Side, embedded_worker, model, probe_of, weights

Build = Callable[[int], Side]


def standin_worker(
    processes: Processes, kind: str, *flags: str, state: Path | None = None, more: tuple[str, ...] = ()
) -> tuple[Process, Process]:
    """(engine, data proxy). ``more``: flags of the data proxy."""
    module = "tests.services.inference.engines.conformance.standins"
    engine = processes.spawn("-m", module, kind, "--model", str(MODEL), *flags, "--lora")
    engine.port = int(engine.wait_log(r"^(\d+)$")[1])
    about = ("--model", "m", "--engine", kind, "--engine-url", engine.url, "--tokenizer-path", str(MODEL))
    kept = ("--state-dir", str(state), "--model-path", str(MODEL)) if state else ()
    proxy = processes.service("data_proxy", *about, *kept, *more)
    wait_ready(proxy)
    return engine, proxy


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "mode"),
    [("vllm", "xccl"), pytest.param("sglang", "xccl", marks=pytest.mark.slow)]
    + [pytest.param(*each, marks=pytest.mark.slow) for each in (("sglang", "disk"), ("vllm", "disk"), ("vllm", "shm"))],
)
def test_standin_update_matches_forward_and_refusal_keeps_old(side: Build, kind: str, mode: str) -> None:
    here = side(0)
    engine, proxy = standin_worker(here.processes, kind)
    here.engines.append(engine)
    here.proxies.append(proxy)
    pair = here.pair(mode)
    pair.connect()
    for version in (1, 2):
        new = model(version)
        done = pair.publish(version, weights(new), probe_of(new))  # compared there
        assert done.paused_ms > 0
        assert here.versions() == [version]
    before = here.greedy(proxy)
    short = [(name, tensor) for name, tensor in weights(model(5)) if "layers.1" not in name]
    refused = here.pair(mode, name="short", folder=Path(f"{here.folder}-short"))
    refused.connect()
    with pytest.raises(WeightUpdateFailed, match=rf"{proxy.url}/weights/\w+ answered 400: .*the old ones serve on"):
        refused.publish(3, short)
    assert (here.greedy(proxy), here.versions()) == (before, [2])
    newer = model(4)
    pair.publish(4, weights(newer), probe_of(newer))


@pytest.mark.extended
def test_update_refused_by_one_worker_leaves_one_version_serving(side: Build, tmp_path: Path) -> None:
    here = side(0)
    for number, flags in enumerate(((), ("--refuses", "1", "3"))):
        engine, proxy = standin_worker(here.processes, "sglang", *flags, state=tmp_path / f"state-{number}")
        here.engines.append(engine)
        here.proxies.append(proxy)
    assert here.versions() == [0, 0]
    own = here.greedy(here.proxies[0])
    pair = here.pair("disk")
    pair.connect()
    took, refused = (proxy.url for proxy in here.proxies)

    def publish(version: int) -> None:
        new = model(version)
        pair.publish(version, weights(new), probe_of(new))

    def there() -> list[tuple[str, str, int]]:
        workers = here.pairs()[0]["inference_workers"]
        return [(each["url"], each["state"], each["version"]) for each in workers]

    for version, before in ((1, 0), (3, 2)):
        with pytest.raises(WeightUpdateFailed, match=f"{refused}/weights/update .*out of memory.* {took}"):
            publish(version)
        wait_until(lambda: there() == [(took, "ready", before), (refused, "ready", before)], what="one version")  # noqa: B023
        assert here.versions() == [before, before]
        answers = {here.greedy(proxy) for proxy in here.proxies}
        assert len(answers) == 1
        assert (answers == {own}) is (before == 0)
        publish(version + 1)
        assert there() == [(took, "ready", version + 1), (refused, "ready", version + 1)]


@pytest.mark.extended
@pytest.mark.parametrize("leased", [False, True])
def test_refused_update_never_leaves_two_ready_versions(side: Build, tmp_path: Path, leased: bool) -> None:
    """Asked without a pause, the router and the workers themselves: from the error on, who is ready has one version."""
    here = side(0)
    router = here.processes.router()
    (tmp_path / "router.json").write_text(json.dumps({"url": router.url}))
    for number, flags in enumerate(((), ("--refuses", "1", "2"))):
        about = {"router_file": str(tmp_path / "router.json"), "worker_id": f"w{number}", "expected": 2}
        more = ("--registration", json.dumps(about)) if leased else ()
        engine, proxy = standin_worker(here.processes, "sglang", *flags, state=tmp_path / f"state-{number}", more=more)
        here.engines.append(engine)
        here.proxies.append(proxy)
    front = here.processes.gateway(router)
    if not leased:
        here.processes.register(router, *here.proxies, model="m")

    def at_router() -> list[int]:
        workers = front.call("GET", "/workers", key=here.processes.key).json()["workers"]
        return [worker["version"] for worker in workers if worker["state"] == "ready"]

    def at_workers() -> list[int]:
        reports = [proxy.call("GET", "/ready") for proxy in here.proxies]
        return [report.json()["version"] for report in reports if report.status == 200]

    wait_until(lambda: at_router() == at_workers() == [0, 0], what="both workers serve")
    pair = here.pair("disk", inference={"inference_gateway_url": front.url, "model": "m"})
    pair.connect()
    for version, before in ((1, 0), (2, 0)):
        new = model(version)
        with pytest.raises(WeightUpdateFailed, match="out of memory"):
            pair.publish(version, weights(new), probe_of(new))
        agree = 0
        while agree < 100:
            for seen in (at_router(), at_workers()):
                assert set(seen) <= {before}, seen
            agree = agree + 1 if len(seen) == 2 else 0
        assert here.versions() == [before, before]


@pytest.mark.slow
def test_broadcast_to_mixed_engine_kinds_is_refused(side: Build) -> None:
    here = side(0)
    for engine, proxy in (standin_worker(here.processes, "sglang"), embedded_worker(here.processes)):
        here.engines.append(engine)
        here.proxies.append(proxy)
    with pytest.raises(WeightUpdateFailed, match="engines of several kinds cannot join the same process group"):
        here.pair("xccl").connect()
    assert here.pairs() == []
