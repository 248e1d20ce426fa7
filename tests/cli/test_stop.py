"""``areal inf stop`` takes no running TrainJob along unasked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cli.conftest import Areal


@pytest.fixture
def trained(record: Callable[..., Any]) -> None:
    record("InferenceService", "default", {})
    record("Model", "m1", {"backend": "embedded", "path": "/m1"})
    record("TrainJob", "grpo", {"driver": "my.code:main", "rollout": {"service": "default", "model": "m1"}})


@pytest.mark.parametrize("flags", [(), ("--yes",), ("--all",), ("--force",)])
def test_running_job_keeps_its_service(areal: Areal, trained: None, flags: tuple[str, ...]) -> None:
    refused = areal("inf", "stop", *flags)
    assert refused.code == 5 and "TrainJob/grpo" in refused.err and "--cascade" in refused.err
    assert len(areal("get", "-o", "name").out.split()) == 3


def test_cascade_asks_and_is_refused_off_a_terminal(areal: Areal, trained: None) -> None:
    refused = areal("inf", "stop", "--cascade")
    assert refused.code == 2 and "--yes" in refused.err
    assert len(areal("get", "-o", "name").out.split()) == 3


def test_cascade_with_a_yes_deletes_the_job_too(areal: Areal, trained: None) -> None:
    assert areal("inf", "stop", "--cascade", "--yes").code == 0
    assert areal("get", "-o", "name").out == ""


def test_service_without_a_job_goes_unasked(areal: Areal, record: Callable[..., Any]) -> None:
    record("InferenceService", "default", {})
    record("Model", "m1", {"backend": "embedded", "path": "/m1"})
    assert areal("inf", "stop").code == 0
    assert areal("get", "-o", "name").out == ""
