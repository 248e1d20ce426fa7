"""What an engine says while it starts, and what is left of one that cannot."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from areal.http.client import HttpClient
from areal.runtime.causes import first_exception
from tests.services.inference.engines.conformance.conftest import kind_params
from tests.services.inference.engines.conformance.engines import REAL, start
from tests.services.inference.engines.conformance.models import Models


@pytest.mark.parametrize("kind", [each for each in kind_params() if "standin" not in str(each)])
async def test_unservable_model_exits_with_root_cause_first(
    kind: str, models: Callable[[bool], Models], log: Path
) -> None:
    if (variable := REAL.get(kind)) and not os.environ.get(variable):
        pytest.skip(f"{variable} names no Python that has {kind}")
    process = start(kind, models(False).broken, log)
    try:
        assert await asyncio.to_thread(process.popen.wait, 600 if kind in REAL else 120) != 0
    finally:
        process.stop()
    output = first_exception((str(log),)) or log.read_text()
    assert "layers" in output or "size" in output or "not initialized" in output, output


@pytest.mark.extended
async def test_embedded_engine_reports_stages_until_serving(
    models: Callable[[bool], Models],
    http: HttpClient,
    log: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AREAL_STAGE_FILE", str(tmp_path / "stage.json"))
    process = start("embedded", models(False).folders[0], log)
    try:
        await process.wait_ready(http)
        assert '"serving"' in (tmp_path / "stage.json").read_text()
    finally:
        process.stop()
