"""How many processes a job trains with, and which layouts are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import InvalidManifest
from areal.reconcilers.desired import Wanted
from areal.reconcilers.kinds.job_config import JobConfig, expand_job
from areal.reconcilers.kinds.job_plan import with_services
from tests.reconcilers.kinds.test_job_service import recorded


def job(config: dict[str, Any], **spec: Any) -> Wanted:
    return Wanted("TrainJob/learn", "TrainJob", "learn", {"config": config, **spec}, {}, {})


def processes(wanted: Wanted) -> Any:
    return (expand_job(wanted, JobConfig.of(wanted)).spec.get("resources") or {}).get("processesPerNode")


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({}, None),
        ({"actor": {"backend": "fsdp:d1"}}, None),
        ({"actor": {"backend": "fsdp:d4"}}, 4),
        ({"actor": {"backend": "${allocation}"}, "allocation": "fsdp:d2"}, 2),
        ({"model": {"backend": "fsdp:d8p1t1"}}, 8),
        ({"allocation_mode": "sglang.d4p1m1+d4p1m1"}, 4),
        ({"allocation_mode": "sglang:d4"}, None),
        ({"allocation_mode": "sglang:d4+fsdp:d8", "actor": {"backend": "fsdp:d2"}}, 2),
    ],
)
def test_job_has_as_many_processes_as_its_configuration_lays_out(config: dict[str, Any], count: int | None) -> None:
    assert processes(job(config)) == count


@given(st.integers(1, 16), st.integers(1, 16))
def test_numbers_that_are_stated_twice_are_the_same_or_refused(laid: int, stated: int) -> None:
    wanted = job({"actor": {"backend": f"fsdp:d{laid}"}}, resources={"processesPerNode": stated})
    if laid == stated:
        assert processes(wanted) == stated
    else:
        with pytest.raises(InvalidManifest, match=f"d{laid} is {laid} processes, and .* makes {stated}"):
            processes(wanted)


@pytest.mark.parametrize(
    ("config", "spec", "says"),
    [
        ({"actor": {"backend": "fsdp:p2"}}, {}, r"TrainJob/learn: actor\.backend 'fsdp:p2': .*no pipeline parallelism"),
        ({"actor": {"backend": "fsdp:d2t2"}}, {}, r"actor\.backend fsdp:d2t2: fsdp shards over data-parallel"),
        ({"allocation_mode": "sglang:d4+fsdp:q4"}, {}, r"allocation_mode .*unknown dimension \"q\""),
        ({"allocation_mode": "sglang.d4p1m1+d2p2m1"}, {}, r"allocation_mode megatron:d2p2: the megatron engine is not"),
        ({}, {"resources": {"nodes": 2}}, r"spec\.resources\.nodes is 2, and spec\.scheduler\.type local"),
    ],
)
def test_layout_that_cannot_be_is_an_error_that_names_the_field(
    config: dict[str, Any], spec: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidManifest, match=says) as caught:
        processes(job(config, **spec))
    assert caught.value.exit_code == 3


def test_job_applied_again_keeps_its_number_when_the_configuration_has_changed() -> None:
    wanted = job({"actor": {"backend": "fsdp:d4"}})
    (first,) = with_services([wanted], [], [])
    stored = recorded({first.ref: first})
    changed = job({"actor": {"backend": "fsdp:d2"}})
    (again,) = with_services([changed], stored, [])
    assert again.spec["resources"] == {"processesPerNode": 4}
    (recreate,) = with_services([changed], stored, [wanted.ref])
    assert recreate.spec["resources"] == {"processesPerNode": 2}
