"""What the processes of a service import at their start: three of them start beside torch, on few cores."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("aiohttp", "pydantic", "httpx", "torch", "numpy", "transformers", "ray")


MODULES = ("inference.router.app", "inference.gateway.app", "inference.data_proxy.process", "agent.worker.app")


@pytest.mark.parametrize("module", MODULES)
def test_process_starts_without_heavy_libraries(module: str) -> None:
    code = f"import sys, areal.services.{module}; print(*(n for n in {HEAVY!r} if n in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == []
