"""The gateway's own surface: what it refuses, and its values and barriers."""

import pytest

from areal.services.http.errors import ApiError
from areal.services.weight_update.app import read_pair
from tests.services.processes import Answer, Process, Processes


@pytest.fixture(scope="module")
def gateway(module_processes: Processes) -> Process:
    return module_processes.service("weight_update")


GOOD = {
    "pair_name": "p",
    "mode": "disk",
    "train_worker_urls": ["http://127.0.0.1:9"],
    "inference_worker_urls": ["http://127.0.0.1:10"],
}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"pair_name": ""}, "pair_name"),
        ({"pair_name": "a/b"}, "pair_name"),
        ({"mode": "pigeon"}, "mode"),
        ({"train_worker_urls": []}, "train_worker_urls"),
        ({"train_worker_urls": ["ftp://x"]}, "train_worker_urls"),
        ({"train_worker_urls": ["http://[::1"]}, "train_worker_urls"),
        ({"train_worker_urls": ["http://127.0.0.1:99999"]}, "train_worker_urls"),
        ({"inference_gateway_url": "http://127.0.0.1:1?a=b", "model": "m"}, "inference_gateway_url"),
        ({"inference_worker_urls": None}, "inference_worker_urls"),
        ({"inference_worker_urls": "http://127.0.0.1:1"}, "inference_worker_urls"),
        ({"inference_worker_urls": ["http://127.0.0.1:9"]}, "inference_worker_urls"),
        ({"inference_gateway_url": "http://127.0.0.1:1"}, "model"),
    ],
)
def test_connect_names_invalid_field(gateway: Process, module_processes: Processes, change: dict, param: str) -> None:
    answer = gateway.call("POST", "/connect", {**GOOD, **change}, key=module_processes.key)
    assert answer.status == 400, answer.body
    assert answer.json()["error"]["param"] == param


def test_connect_with_silent_workers_leaves_nothing(gateway: Process, module_processes: Processes) -> None:
    for _ in range(2):  # the name is free again
        answer = gateway.call("POST", "/connect", GOOD, key=module_processes.key)
        assert answer.status == 502
        assert "http://127.0.0.1:9/weights/connect does not answer" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/update_weights", "/force_sync", "/disconnect"])
def test_an_unknown_pair_is_404(gateway: Process, module_processes: Processes, path: str) -> None:
    answer = gateway.call("POST", path, {"pair_name": "absent", "version": 1}, key=module_processes.key)
    assert answer.status == 404
    assert answer.json()["error"]["code"] == "pair_not_found"
    for body in ({}, {"pair_name": 5, "version": 1}):
        answer = gateway.call("POST", path, body, key=module_processes.key)
        assert (answer.status, answer.json()["error"]["param"]) == (400, "pair_name")


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/connect"), ("GET", "/pairs"), ("GET", "/weight_meta/p/k"), ("PUT", "/weight_meta/p/k")],
)
def test_every_route_requires_key(gateway: Process, method: str, path: str) -> None:
    assert gateway.call(method, path, {}).status == 401
    assert gateway.call(method, path, {}, key="wrong").status == 403


def test_values_and_barriers(gateway: Process, module_processes: Processes) -> None:
    def ask(method: str, path: str, body: object = None) -> Answer:
        return gateway.call(method, f"/weight_meta/p/{path}", body, key=module_processes.key)

    assert ask("GET", "k").status == 404
    assert ask("PUT", "k", {"value": None}).status == 200
    assert ask("GET", "k").json() == {"value": None}
    assert ask("PUT", "k", {}).status == 400
    assert ask("DELETE", "k").json()["deleted"] is True
    assert ask("DELETE", "k").json()["deleted"] is False
    assert ask("PUT", "set/ready", {"value": "a"}).json()["size"] == 1
    assert ask("PUT", "set/ready", {"value": "a"}).json()["size"] == 1
    assert ask("PUT", "set/ready", {"value": "b"}).json()["size"] == 2
    assert ask("GET", "set/ready/size").json() == {"size": 2}
    assert ask("GET", "set/absent/size").json() == {"size": 0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("master_addr", "h"),
        ("master_port", 1),
        ("save_path", "/w"),
        ("use_lora", True),
        ("lora_name", "a"),
        ("colocate", True),
    ],
)
def test_unsupported_connect_field_is_400(field: str, value: object) -> None:
    body = {"pair_name": "p", "train_worker_urls": ["http://h:1"], "inference_worker_urls": ["http://h:2"]}
    with pytest.raises(ApiError) as caught:
        read_pair({**body, field: value})
    assert (caught.value.status, caught.value.param) == (400, field)
    read_pair({**body, "use_lora": False, "colocate": False, "lora_name": None})
