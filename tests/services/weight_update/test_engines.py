"""The other engines behind the same path: stand-ins that speak vLLM's and SGLang's routes, and really compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from areal.training.weights.publisher import WeightUpdateFailed
from tests.services.processes import Process, Processes, wait_ready
from tests.services.weight_update.conftest import MODEL, Side, embedded_worker, model, probe_of, weights

Build = Callable[[int], Side]


def standin_worker(processes: Processes, kind: str) -> tuple[Process, Process]:
    engine = processes.spawn("-m", "tests.services.engine_conformance.standins", kind, "--model", str(MODEL), "--lora")
    engine.port = int(engine.wait_log(r"^(\d+)$")[1])
    flags = ("--model", "m", "--engine", kind, "--engine-url", engine.url, "--tokenizer-path", str(MODEL))
    proxy = processes.service("data_proxy", *flags)
    wait_ready(proxy)
    return engine, proxy


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("vllm", "xccl"), ("sglang", "xccl"), pytest.param("sglang", "disk", marks=pytest.mark.slow)]
    + [pytest.param("vllm", mode, marks=pytest.mark.slow) for mode in ("disk", "shm")],
)
def test_update_of_another_engine_is_what_a_plain_forward_pass_has_and_a_refusal_keeps_the_old(
    side: Build, kind: str, mode: str
) -> None:
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


@pytest.mark.slow
def test_broadcast_to_engines_of_two_kinds_is_refused(side: Build) -> None:
    here = side(0)
    for engine, proxy in (standin_worker(here.processes, "sglang"), embedded_worker(here.processes)):
        here.engines.append(engine)
        here.proxies.append(proxy)
    with pytest.raises(WeightUpdateFailed, match="engines of several kinds do not join one process group"):
        here.pair("xccl").connect()
    assert here.pairs() == []
