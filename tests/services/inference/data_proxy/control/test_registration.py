"""Models registered by hand: all or nothing, and what was there before stays when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.inference.houses import House, build_house
from tests.services.processes import Answer, Process, Processes


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[House]:
    processes = Processes(tmp_path_factory.mktemp("registration"))
    yield build_house(processes, tokenizer, replicas=2)
    processes.stop()


@pytest.fixture(scope="module")
def second(house: House, tokenizer: Path) -> Process:
    """A data proxy for another model, not registered."""
    return house.processes.data_proxy(house.engine, tokenizer, model="second")


def post(house: House, path: str, **body: Any) -> Answer:
    return house.gateway.call("POST", path, body, key=house.key)


def workers_of(house: House, model: str) -> set[tuple[str, str]]:
    workers = house.gateway.call("GET", "/workers", key=house.key).json()["workers"]
    return {(worker["worker_id"], worker["worker_addr"]) for worker in workers if worker["model"] == model}


def test_registered_model_is_served_and_deregistered_one_is_not(house: House, second: Process) -> None:
    answer = post(house, "/register_model", model="second", data_proxy_addrs=[second.url])
    assert (answer.status, answer.json()) == (
        200,
        {"status": "ok", "model": "second", "data_proxy_addrs": [second.url]},
    )
    assert house.chat(model="second").status == 200
    assert post(house, "/deregister_model", model="second").status == 200
    assert workers_of(house, "second") == set() and workers_of(house, "tiny")
    assert post(house, "/deregister_model", model="second").status == 404


def test_registering_again_keeps_the_ids_of_workers_that_stay(house: House) -> None:
    before = workers_of(house, "tiny")
    answer = post(house, "/register_model", model="tiny", data_proxy_addrs=[proxy.url for proxy in house.proxies])
    assert answer.status == 200 and workers_of(house, "tiny") == before


@pytest.mark.parametrize(("wrong", "status"), [("nobody", 502), ("another model", 409), ("no data proxy", 409)])
def test_registration_with_one_bad_proxy_changes_nothing(
    house: House, second: Process, wrong: str, status: int
) -> None:
    before = workers_of(house, "tiny")
    bad = {"nobody": "http://127.0.0.1:9", "another model": second.url, "no data proxy": house.router.url}[wrong]
    answer = post(house, "/register_model", model="tiny", data_proxy_addrs=[house.proxy.url, bad])
    assert answer.status == status and bad in answer.json()["error"]["message"]
    assert workers_of(house, "tiny") == before
    assert house.chat().status == 200


def test_name_that_the_router_refuses_leaves_nothing_behind(house: House, tokenizer: Path) -> None:
    odd = house.processes.data_proxy(house.engine, tokenizer, model="no such name!")
    answer = post(house, "/register_model", model="no such name!", data_proxy_addrs=[odd.url])
    assert answer.status == 400 and workers_of(house, "no such name!") == set()


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
def test_malformed_registration_is_400_and_names_the_field(house: House, body: dict[str, Any], param: str) -> None:
    answer = post(house, "/register_model", **body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)
