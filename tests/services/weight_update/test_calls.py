"""The calls of an update, with workers that only answer."""

import asyncio
from typing import Any

import pytest

from areal.services.http.errors import ApiError
from areal.services.weight_update.pairs import Mode, Pair
from areal.services.weight_update.updating import Updater, WorkerClient, WorkerFailed
from areal.wire.bodies import ProbeOfWeights, PublishedVersion

PUBLISHED: PublishedVersion = {"source": {"path": "/w"}, "bytes": 9}
SEVERAL = ["pairs", "prepare", "update", "commit"]
PROBE: ProbeOfWeights = {"input_ids": [1], "expected": {"2": 0.0}, "tolerance": 0.1}


class Workers(WorkerClient):
    """``fails``: the status of the failure of a route."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}
        self.parting_s = 1.0

    async def _request(self, method: str, url: str, path: str, body: bytes, timeout_s: float | None) -> dict[str, Any]:
        route = path.removeprefix("/weights/")
        self.calls.append(route)
        if route in self.fails:
            raise WorkerFailed(f"{url}{path} answered {self.fails[route]}", self.fails[route])
        return {"pairs": ["actor"], "incarnation": "first", "paused_ms": 1.5, "source": {"path": "/w"}, "bytes": 9}


def update(workers: Workers, pair: Pair, version: int, published: PublishedVersion | None) -> list[str]:
    """The calls of one update."""
    workers.calls.clear()
    try:
        done = asyncio.run(Updater(workers).update(pair, version, published))
        assert (done.version, done.paused_ms, done.bytes) == (version, 1.5, 9)
    except ApiError as error:
        assert error.status == 502
    return list(workers.calls)


@pytest.mark.parametrize(
    ("published", "several"),
    [
        pytest.param(PUBLISHED, SEVERAL, id="given"),
        pytest.param(None, ["pairs", "publish", *SEVERAL[1:]], id="asked"),
        pytest.param(
            {"source": {"path": "/w"}, "bytes": 9, "probe": PROBE}, [*SEVERAL[:3], "check", "commit"], id="probe"
        ),
    ],
)
def test_known_only_worker_gets_one_call_unless_trainer_is_asked_or_weights_are_probed(
    published: PublishedVersion | None, several: list[str]
) -> None:
    workers, pair = Workers(), Pair("actor", Mode.SHM, ("http://trainer",), ("http://worker",))
    assert update(workers, pair, 1, published) == several
    once = ["replace"] if several is SEVERAL else several
    assert update(workers, pair, 2, published) == once
    assert update(workers, pair, 3, published) == once


@pytest.mark.parametrize(("status", "failed"), [(404, ["replace", *SEVERAL]), (400, ["replace", "revert"])])
def test_update_after_failed_call_takes_several(status: int, failed: list[str]) -> None:
    """404: the worker has restarted, or is of an earlier version, so this update itself takes them."""
    workers, pair = Workers(), Pair("actor", Mode.SHM, ("http://trainer",), ("http://worker",))
    update(workers, pair, 1, PUBLISHED)
    workers.fails["replace"] = status
    calls = update(workers, pair, 2, PUBLISHED)
    assert [call for call in calls if "?" not in call] == failed
    if status == 400:
        assert update(workers, pair, 3, PUBLISHED) == SEVERAL


def test_several_workers_are_prepared_before_one_swaps() -> None:
    workers, pair = Workers(), Pair("actor", Mode.SHM, ("http://trainer",), ("http://one", "http://two"))
    for version in (1, 2):
        assert update(workers, pair, version, PUBLISHED) == [each for each in SEVERAL for _ in range(2)]
