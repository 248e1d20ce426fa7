"""Sessions by their keys: awkward ones, pages, access."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.services.agent.gateway.conftest import INFERENCE, AgentService
from tests.services.processes import Processes, call, wait_until

AWKWARD = ["a/b", "../../admin", "..", "%2F", "a b?x=1#y", "ключ", "x" * 1024, "/close?", "sk-fake"]


@pytest.mark.parametrize("key", AWKWARD, ids=range(len(AWKWARD)))
def test_key_with_special_characters_is_one_session(service: AgentService, key: str) -> None:
    answer = service.call("POST", "/sessions", {"session_key": key, "metadata": {"task": 1}})
    assert (answer.status, answer.json()["session_key"]) == (201, key)
    again = service.call("POST", "/sessions", {"session_key": key, "metadata": {"task": 2}})
    assert (again.status, again.json()) == (200, answer.json()), "the session that is there, as it is"
    header = key.encode().decode("latin-1")
    assert service.respond("hello", header).headers["x-areal-session-key"] == header
    path = f"/sessions/{quote(key, safe='')}"
    reported = service.call("GET", path).json()
    assert (reported["session_key"], reported["metadata"], reported["turns"]) == (key, {"task": 1}, 1)
    for verb, body in (("reward", {"reward": 0.5}), ("export", None)):
        assert service.call("POST", f"{path}/{verb}", body).json()["error"]["code"] == "no_inference"
    assert service.call("POST", "/sessions/close", {"session_key": key}).status == 200
    assert service.call("GET", path).status == 410
    ended = service.respond("hello again", header)
    assert (ended.status, ended.json()["error"]["code"]) == (410, "session_ended")
    assert "POST /sessions" in ended.json()["error"]["message"]
    assert service.call("POST", "/sessions", {"session_key": key}).status == 201
    assert service.respond("hello", header).status == 200


def test_generated_key_without_journal_is_404_with_hint(service: AgentService) -> None:
    gone = service.respond("hello", "sk-aaaaaaaa-" + "x" * 43)
    assert (gone.status, gone.json()["error"]["code"]) == (404, "session_not_found")
    assert "POST /sessions makes one" in gone.json()["error"]["message"]


@pytest.mark.parametrize("key", ["", "x" * 1025, "é" * 513, "a\tb", 3, "\ud800"])
def test_bad_key_is_refused(service: AgentService, key: object) -> None:
    for path in ("/sessions", "/sessions/close"):
        answer = service.call("POST", path, {"session_key": key})
        assert answer.status == 400, path


@pytest.mark.parametrize("levels", [199, 200, 201, 253])
def test_metadata_nested_too_deep_is_refused(service: AgentService, levels: int) -> None:
    nested: dict[str, object] = {}
    for _ in range(levels - 2):
        nested = {"x": nested}
    bodies = {"/sessions": {"metadata": nested}, "/v1/responses": {"input": "hello", "metadata": nested}}
    for path, body in bodies.items():
        answer = service.call("POST", path, body)
        assert (answer.status < 300) is (levels <= 200), (path, answer.json())
        assert answer.status != 400 or "more than 200 levels" in answer.json()["error"]["message"]


def test_bad_key_in_a_header_or_a_path_is_refused(service: AgentService) -> None:
    assert service.respond("hello", "\xff\xfe").json()["error"]["param"] == "X-AReaL-Session-Key"
    assert service.respond("hello", "x" * 1025).status == 400
    assert service.call("GET", "/sessions/%FF%00").status == 400
    assert service.call("POST", "/sessions", {"session_key": "\ufffd"}).status == 201
    assert service.call("GET", "/sessions/%FF").status == 400, "no other name for the session U+FFFD"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/sessions/absent", None),
        ("POST", "/sessions/close", {"session_key": "absent"}),
        ("DELETE", "/sessions/absent/turn", None),
        ("POST", "/sessions/absent/reward", {"reward": 1}),
        ("POST", "/sessions/absent/export", {}),
        ("GET", "/sessions/sk-aaaaaaaa-" + "x" * 43, None),
    ],
)
def test_unknown_session_is_404(service: AgentService, method: str, path: str, body: object) -> None:
    answer = service.call(method, path, body)
    assert (answer.status, answer.json()["error"]["code"]) == (404, "session_not_found")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/sessions", {"metadata": 3}, "metadata"),
        ("/sessions", {"metadata": {"areal_inference": {}}}, "metadata.areal_inference"),
        ("/sessions", {"inf_base_url": INFERENCE}, "session_api_key"),
        ("/sessions/close", {}, "session_key"),
        ("/sessions/absent/reward", {}, "reward"),
        ("/sessions/absent/reward", {"reward": "1"}, "reward"),
        ("/sessions/absent/export", {"style": "best"}, "style"),
    ],
)
def test_bad_body_is_refused_by_name(service: AgentService, path: str, body: object, param: str) -> None:
    answer = service.call("POST", path, body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


def test_list_pages_contain_every_session(service: AgentService) -> None:
    made = {service.call("POST", "/sessions", {}).json()["session_key"] for _ in range(7)}
    assert len(made) == 7
    found: list[str] = []
    after = ""
    while True:
        page = service.call("GET", f"/sessions?limit=3&after={quote(after)}").json()
        found += [session["session_key"] for session in page["sessions"]]
        assert page["journals_away"] == []
        if page["next"] is None:
            break
        after = page["next"]
    assert found == sorted(set(found)) and made <= set(found)


def test_new_sessions_are_spread(service: AgentService) -> None:
    before = [proxy.call("GET", "/health").json()["sessions"] for proxy in service.proxies]

    def reported() -> bool:  # the router knows what other tests have closed
        workers = service.router.call("GET", "/workers", key=service.key).json()["workers"]
        known = {worker["worker_addr"]: worker["sessions"] for worker in workers}
        return [known[proxy.url] for proxy in service.proxies] == before

    wait_until(reported)
    for _ in range(10):
        service.call("POST", "/sessions", {})
    after = [proxy.call("GET", "/health").json()["sessions"] for proxy in service.proxies]
    assert abs(after[0] - after[1]) <= abs(before[0] - before[1])


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/responses"), ("POST", "/v1/chat/completions"), ("GET", "/sessions"), ("POST", "/sessions/close")],
)
def test_admin_key_is_required(service: AgentService, method: str, path: str) -> None:
    assert call(service.gateway.port, method, path, {"input": "hello"}).status == 401
    assert call(service.gateway.port, method, path, {"input": "hello"}, key="wrong-key-0123456789").status == 403


def test_service_without_pairs_is_503(processes: Processes) -> None:
    router = processes.router()
    gateway = processes.service("agent.gateway", "--router-url", router.url, "--service", "helper")
    router.call("POST", "/synced", {}, key=processes.key)
    made = "/sessions/sk-aaaaaaaa-" + "x" * 43
    asked = [("POST", "/v1/responses", {"input": "hello"}), ("GET", "/sessions", None), ("GET", "/sessions/mine", None)]
    for method, path, body in [*asked, ("GET", made, None), ("POST", f"{made}/reward", {"reward": 1})]:
        answer = gateway.call(method, path, body, key=processes.key)
        assert (answer.status, answer.json()["error"]["code"]) == (503, "no_worker_available"), path
