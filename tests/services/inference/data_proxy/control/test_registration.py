"""Models registered by hand: all or nothing, and what was there before stays when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.inference.running_service import Service, build_service
from tests.services.processes import Answer, Process, Processes


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[Service]:
    processes = Processes(tmp_path_factory.mktemp("registration"))
    yield build_service(processes, tokenizer, replicas=2)
    processes.stop()


@pytest.fixture(scope="module")
def second(service: Service, tokenizer: Path) -> Process:
    """A data proxy for another model, not registered."""
    return service.processes.data_proxy(service.engine, tokenizer, model="second")


def post(service: Service, path: str, **body: Any) -> Answer:
    return service.gateway.call("POST", path, body, key=service.key)


def workers_of(service: Service, model: str) -> set[tuple[str, str]]:
    workers = service.gateway.call("GET", "/workers", key=service.key).json()["workers"]
    return {(worker["worker_id"], worker["worker_addr"]) for worker in workers if worker["model"] == model}


def test_model_is_served_until_deregistered(service: Service, second: Process) -> None:
    answer = post(service, "/register_model", model="second", data_proxy_addrs=[second.url])
    assert (answer.status, answer.json()) == (
        200,
        {"status": "ok", "model": "second", "data_proxy_addrs": [second.url]},
    )
    assert service.chat(model="second").status == 200
    assert post(service, "/deregister_model", model="second").status == 200
    assert workers_of(service, "second") == set() and workers_of(service, "tiny")
    assert post(service, "/deregister_model", model="second").status == 404


def test_reregistration_keeps_ids_of_remaining_workers(service: Service) -> None:
    before = workers_of(service, "tiny")
    answer = post(service, "/register_model", model="tiny", data_proxy_addrs=[proxy.url for proxy in service.proxies])
    assert answer.status == 200 and workers_of(service, "tiny") == before


@pytest.mark.parametrize(("wrong", "status"), [("absent", 502), ("another model", 409), ("no data proxy", 409)])
def test_registration_with_one_bad_proxy_changes_nothing(
    service: Service, second: Process, wrong: str, status: int
) -> None:
    before = workers_of(service, "tiny")
    bad = {"absent": "http://127.0.0.1:9", "another model": second.url, "no data proxy": service.router.url}[wrong]
    answer = post(service, "/register_model", model="tiny", data_proxy_addrs=[service.proxy.url, bad])
    assert answer.status == status and bad in answer.json()["error"]["message"]
    assert workers_of(service, "tiny") == before
    assert service.chat().status == 200


def test_name_refused_by_router_leaves_no_worker(service: Service, tokenizer: Path) -> None:
    odd = service.processes.data_proxy(service.engine, tokenizer, model="no such name!")
    answer = post(service, "/register_model", model="no such name!", data_proxy_addrs=[odd.url])
    assert answer.status == 400 and workers_of(service, "no such name!") == set()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"data_proxy_addrs": ["127.0.0.1:1"]}, "model"),
        ({"model": "m"}, "data_proxy_addrs"),
        ({"model": "m", "data_proxy_addrs": []}, "data_proxy_addrs"),
        ({"model": "m", "data_proxy_addrs": ["http://h/x"]}, "data_proxy_addrs"),
        ({"model": "m", "data_proxy_addrs": ["127.0.0.1:1"], "api_key": "k"}, "api_key"),
    ],
)
def test_malformed_registration_is_400_naming_field(service: Service, body: dict[str, Any], param: str) -> None:
    answer = post(service, "/register_model", **body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)
