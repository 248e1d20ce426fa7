"""The list for Prometheus: who is in it, and for how long."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.services.inference.router.app import RegisteredTargets, targets_of
from areal.services.inference.router.health import ProbeResult
from areal.services.inference.router.registry import WorkerRegistry, WorkerReport
from areal.wire.bodies import RegisterTarget, RenewLease
from areal.wire.fields import read_fields


def addresses(registry: WorkerRegistry) -> list[tuple[str, str]]:
    return [(each["labels"]["job"], each["targets"][0]) for each in targets_of(registry.workers())]


def renew(registry: WorkerRegistry, worker_id: str, port: int, model: str = "m") -> None:
    report = WorkerReport(engine_url=f"http://user:secret@h:{port + 1}")
    registry.renew(
        RenewLease(worker_id=worker_id, worker_addr=f"http://h:{port}", model=model), ProbeResult.READY, report, 0.0
    )


def test_scrape_list_follows_rolling_update_ports() -> None:
    registry = WorkerRegistry()
    renew(registry, "w0", 10)
    assert addresses(registry) == [("areal-data-proxy", "h:10"), ("areal-engine", "h:11")]
    renew(registry, "w0-next", 20)  # its successor, while the old one still drains
    assert len(addresses(registry)) == 4
    registry.register_model("m", [("w0-next", "http://h:20")], expected=1, external=False)
    assert addresses(registry) == [("areal-data-proxy", "h:20"), ("areal-engine", "h:21")]
    renew(registry, "w0-next", 30)  # started again elsewhere
    assert addresses(registry) == [("areal-data-proxy", "h:30"), ("areal-engine", "h:31")]


def test_data_proxy_of_several_models_is_scraped_once() -> None:
    registry = WorkerRegistry()
    renew(registry, "w0", 10, "m")
    renew(registry, "w1", 10, "n")
    assert len(addresses(registry)) == 2


def target(**data: Any) -> RegisterTarget:
    return read_fields(RegisterTarget, data, lenient=True)


def test_registered_target_is_listed_until_expiry() -> None:
    targets = RegisteredTargets()
    targets.register(target(target="127.0.0.1:9", labels={"job": "areal-trainer"}, ttl_seconds=30), 0.0)
    assert targets.all(29.0) == [{"targets": ["127.0.0.1:9"], "labels": {"job": "areal-trainer"}}]
    targets.register(target(target="127.0.0.1:9", ttl_seconds=30), 29.0)
    assert targets.all(58.0) == [{"targets": ["127.0.0.1:9"], "labels": {}}]
    assert targets.all(59.0) == []
    targets.register(target(target="[::1]:9"), 60.0)
    targets.register(target(target="[::1]:9", ttl_seconds=0), 61.0)
    assert targets.all(61.0) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"target": "h"},
        {"target": "h:99999"},
        {"target": "http://h:9"},
        {"target": "h:9", "labels": {"__address__": "other:1"}},
        {"target": "h:9", "labels": {"a-b": "c"}},
        {"target": "h:9", "labels": {"a": 1}},
        {"target": "h:9", "ttl_seconds": -1},
        {"target": "h:9", "ttl_seconds": True},
        {"target": "h:9", "ttl_seconds": float("nan")},
    ],
)
def test_rejects_invalid_target(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        target(**wrong)


_FIELDS = st.sampled_from(["target", "labels", "ttl_seconds"])
_VALUES = st.none() | st.text() | st.floats() | st.integers() | st.dictionaries(st.text(), st.text() | st.none())


@settings(deadline=None)
@given(st.dictionaries(_FIELDS, _VALUES))
def test_any_body_parses_or_raises_value_error(data: dict[str, Any]) -> None:
    with contextlib.suppress(ValueError):
        RegisteredTargets().register(target(**data), 0.0)
