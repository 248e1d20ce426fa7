"""When a data proxy renews its lease."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal.http.client import HttpReply
from areal.http.headers import Headers
from areal.services.http import lease, tasks
from areal.services.http.lease import RouterLease, renewal_s
from areal.wire.routing import DECLARED, DEFAULT_READINESS
from tests.services.processes import Processes


def waits(answer: dict[str, float], monkeypatch: pytest.MonkeyPatch, *, is_idle: bool) -> list[float]:
    """The seconds to the next renewal, for processes whose beats differ."""
    found = []
    for phase in range(100):
        monkeypatch.setattr(tasks, "_PHASE_S", phase * answer["renew_seconds"] / 37)
        found.append(renewal_s(answer, is_idle=is_idle))
    return found


@pytest.mark.parametrize(
    ("answer", "idle_s"),
    [
        ({"renew_seconds": 1.0, "lease_seconds": 5.0}, 2.0),
        ({"renew_seconds": 1.0, "lease_seconds": 2.0}, 1.0),
        ({"renew_seconds": 0.5, "lease_seconds": 3.5}, 1.0),
        ({"renew_seconds": 1.5, "lease_seconds": 6.5}, 2.0),
        ({"renew_seconds": 4.0, "lease_seconds": 14.0}, 4.0),
        ({"renew_seconds": 1.0, "lease_seconds": 100.0}, 2.0),
        ({"renew_seconds": 1.0}, 1.0),
    ],
)
async def test_idle_process_renews_lease_less_often(
    answer: dict[str, float], idle_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_idle, usual_s in ((True, idle_s), (False, answer["renew_seconds"])):
        found = waits(answer, monkeypatch, is_idle=is_idle)
        assert 0.25 * usual_s <= min(found) and usual_s * 0.99 <= max(found) <= 1.25 * usual_s


@pytest.mark.parametrize("period_s", [0.1, 1.0, 10.0, 60.0])
@pytest.mark.parametrize("failures", [1, 2, 3])
@pytest.mark.parametrize("is_idle", [False, True])
async def test_lease_is_renewed_before_expiry(
    period_s: float, failures: int, is_idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"renew_seconds": period_s, "lease_seconds": period_s * failures + 2.0}
    assert max(waits(answer, monkeypatch, is_idle=is_idle)) < answer["lease_seconds"] - 1.0


async def test_idle_process_in_doubt_renews_as_often_as_busy(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = processes.router()

    def longest_wait(status: str) -> float:
        body = {"worker_id": "w0", "worker_addr": "http://127.0.0.1:9", "model": "m", "status": status}
        answer = router.call("POST", "/lease", body, key=processes.key).json()
        return max(waits(answer, monkeypatch, is_idle=True))

    assert longest_wait("ready") > 2.0
    assert longest_wait("not ready") > 2.0, "it reports at once that it is ready again"
    assert longest_wait("ready") <= 1.25, "the second report makes it ready"
    assert longest_wait("ready") > 2.0


async def test_new_router_gets_lease_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_SPREAD_S", 0.0)
    monkeypatch.setattr(lease, "IDLE_S", 0.05)
    monkeypatch.setattr(lease, "_POLL_S", 0.05)
    renewals: asyncio.Queue[str] = asyncio.Queue()

    class Router:
        async def fetch(self, method: str, url: str, path: str, **options: Any) -> HttpReply:
            renewals.put_nowait(url)
            body = b'{"registered": true, "renew_seconds": 3600, "lease_seconds": 7200}'
            return HttpReply(200, Headers({}), body)

    def announce(epoch: str) -> None:
        file.write_text(json.dumps({"url": "http://h:1", "epoch": epoch, DECLARED: {}}))

    file = tmp_path / "routes.json"
    announce("a")
    about = {"worker_id": "w0", "expected": 1, "readiness": DEFAULT_READINESS, "held": False}
    settings: Any = SimpleNamespace(router_file=str(file), **about)
    life = SimpleNamespace(news=asyncio.Event())
    service: Any = SimpleNamespace(readiness=lambda: {"in_flight": 0}, lifetime=life, address="http://h:2")
    router: Any = Router()
    async with tasks.background("lease", RouterLease(settings, service, router, {}, "m").run):
        assert await asyncio.wait_for(renewals.get(), 20) == "http://h:1"
        file.write_text(file.read_text().replace("{}", '{"models": {}}'))  # the same router declares more
        await asyncio.sleep(0.2)
        assert renewals.empty()
        announce("b")
        await asyncio.wait_for(renewals.get(), 20)
