"""A model's own rhythm of probes, in a running router."""

from __future__ import annotations

from pathlib import Path

from tests.services.processes import Process, Processes, wait_until


def states(router: Process, key: str) -> dict[str, str]:
    workers = router.call("GET", "/workers", key=key).json()["workers"]
    return {worker["worker_id"]: worker["state"] for worker in workers}


def test_models_are_probed_as_each_says_and_a_change_holds_at_once(processes: Processes, tokenizer: Path) -> None:
    engine = processes.engine(tokenizer)
    quick, slow = (processes.data_proxy(engine, tokenizer, model=name) for name in ("quick", "slow"))
    router = processes.router()
    often = {"period_seconds": 0.05, "timeout_seconds": 1, "failure_threshold": 2, "success_threshold": 1}
    seldom = {**often, "period_seconds": 3600}
    for proxy, name, readiness in ((quick, "quick", often), (slow, "slow", seldom)):
        body = {**processes.registration(proxy, model=name, expected=None), "readiness": readiness}
        assert router.call("POST", "/register_model", body, key=processes.key).status == 200
    assert states(router, processes.key) == {"quick-0": "ready", "slow-0": "ready"}
    quick.kill()
    slow.kill()
    wait_until(lambda: states(router, processes.key)["quick-0"] == "dead", what="the quick one is found dead")
    assert states(router, processes.key)["slow-0"] == "ready", "nobody has asked it yet"

    body = {**processes.registration(slow, model="slow", expected=None), "readiness": often}
    assert router.call("POST", "/register_model", body, key=processes.key).status == 200
    wait_until(lambda: states(router, processes.key)["slow-0"] == "dead", what="the slow one is asked now")


def test_readiness_that_makes_no_sense_is_refused(processes: Processes) -> None:
    router = processes.router()
    body = {"model": "m", "workers": [], "readiness": {"period_seconds": -1}}
    answer = router.call("POST", "/register_model", body, key=processes.key)
    assert answer.status == 400 and "readiness.period_seconds must be above 0" in answer.json()["error"]["message"]
