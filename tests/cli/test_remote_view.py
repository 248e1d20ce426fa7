"""``--gateway``: what is shown of a service elsewhere is what its gateway and router say of each worker."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.cli.remote_view import GatewayAnswers, model_healths, service_health
from areal.client.gateway import KeyRefused
from areal.errors import ArealError
from tests.cli.conftest import Areal, serving

READY = (200, {"status": "ready", "reason": ""})
STATES = ("ready", "dead", "draining", "cordoned")


def worker(number: int, state: str, model: str = "m", **more: Any) -> dict[str, Any]:
    return {
        "worker_id": f"w{number}",
        "worker_addr": f"http://127.0.0.1:{number}",
        "model": model,
        "state": state,
    } | more


def told(*workers: dict[str, Any], expected: int | None = None, listed: tuple[str, ...] = ("m",)) -> GatewayAnswers:
    declared = {} if expected is None else {"models": {"m": {"expected": expected, "published": True}}}
    return GatewayAnswers(READY, [{"id": name} for name in listed], {"workers": list(workers), **declared})


@pytest.mark.parametrize(
    ("seen", "phase", "fraction"),
    [
        (told(worker(1, "ready"), expected=1), "Ready", "1/1"),
        (told(worker(1, "ready")), "Ready", "1/1"),  # a router of an earlier version
        (told(worker(1, "dead"), expected=1), "Degraded", "0/1"),
        (told(worker(1, "dead")), "Degraded", "0/1"),
        (told(worker(1, "ready"), worker(2, "dead"), expected=2), "Degraded", "1/2"),
        (told(worker(1, "ready"), worker(2, "cordoned"), expected=2), "Degraded", "1/2"),
        (told(worker(1, "ready"), worker(2, "draining"), expected=1), "Ready", "1/1"),
        (told(worker(1, "draining"), expected=1), "Degraded", "0/1"),
        (told(worker(1, "ready"), expected=2, listed=()), "Progressing", "1/2"),
        (told(expected=1, listed=()), "Progressing", "0/1"),
        (told(worker(1, "ready"), expected=1, listed=()), "Progressing", "1/1"),
        (GatewayAnswers(READY, ArealError("503"), {"workers": [worker(1, "ready")]}), "Unknown", "0/1"),
    ],
)
def test_remote_model_health_follows_its_workers(seen: GatewayAnswers, phase: str, fraction: str) -> None:
    found = model_healths(seen)["m"]
    assert (found.phase, found.fraction) == (phase, fraction), found
    assert found.phase == "Ready" or found.message


def test_dead_worker_is_named_with_its_fault() -> None:
    found = model_healths(told(worker(1, "dead", fault="401 from upstream; check the key")))["m"]
    assert "w1 is dead (401 from upstream; check the key)" in found.message


def test_adapter_health_equals_model_health() -> None:
    listed = [{"id": "m"}, {"id": "m:a", "parent": "m"}]
    found = model_healths(GatewayAnswers(READY, listed, {"workers": [worker(1, "dead")]}))
    assert found["m"] == found["m:a"] and found["m"].phase == "Degraded"


@pytest.mark.parametrize(
    ("seen", "phase"),
    [
        (told(), "Ready"),
        (GatewayAnswers((503, {"reason": "no table"}), [], {"workers": []}), "Progressing"),
        (GatewayAnswers((404, "no such route"), [], ArealError("404")), "Unknown"),
        (GatewayAnswers(ArealError("silent"), [], {"workers": []}), "Unknown"),
        (GatewayAnswers(READY, [], ArealError("the router is away")), "Degraded"),
        (GatewayAnswers(READY, [], KeyRefused("refuses the key")), "Unknown"),
    ],
)
def test_remote_service_is_ready_with_gateway_and_router(seen: GatewayAnswers, phase: str) -> None:
    found = service_health(seen)
    assert found.phase == phase and (found.message == "") is (phase == "Ready")


_WORKERS = st.lists(st.tuples(st.sampled_from("mno"), st.sampled_from(STATES)), max_size=6)


@settings(deadline=None, max_examples=60)
@given(
    _WORKERS, st.dictionaries(st.sampled_from("mno"), st.integers(0, 3)), st.sets(st.sampled_from("mno")), st.booleans()
)
def test_model_is_ready_only_with_every_replica(
    pairs: list[tuple[str, str]], expected: dict[str, int], listed: set[str], asked: bool
) -> None:
    rows = [worker(number, state, model) for number, (model, state) in enumerate(pairs)]
    models = {name: {"expected": count, "published": True} for name, count in expected.items()}
    answer: Any = {"workers": rows, "models": models} if asked else ArealError("no answer")
    for name, found in model_healths(GatewayAnswers(READY, [{"id": each} for each in listed], answer)).items():
        ready = sum((model, state) == (name, "ready") for model, state in pairs)
        whole = asked and name in listed and ready >= max(expected.get(name, 1), 0)
        assert (found.phase == "Ready") <= whole
        assert found.ready <= found.desired


class Elsewhere:
    """Answers by path; a path without an answer is held until the end."""

    url = ""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self._ended = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path not in outer.answers:
                    outer._ended.wait(30)
                    return
                status, document = outer.answers[self.path]
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        self.handler = Handler

    def end(self) -> None:
        self._ended.set()


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    there = Elsewhere()
    there.answers = {
        "/ready": READY,
        "/health": (200, {"status": "ok"}),
        "/v1/models": (200, {"data": [{"id": "m", "owned_by": "areal"}]}),
        "/workers": (200, {"workers": [worker(1, "dead")], "models": {"m": {"expected": 1, "published": True}}}),
    }
    with serving(there.handler) as there.url:
        yield there
        there.end()


def phases(areal: Areal, url: str) -> dict[str, Any]:
    """The model's phase by every view, and what status says of the whole."""
    items = json.loads(areal("get", "--gateway", url, "-o", "json").out)["items"]
    rows = json.loads(areal("inf", "models", "--gateway", url, "-o", "json").out)["items"]
    status = areal("inf", "status", "--gateway", url, "-o", "json")
    found = json.loads(status.out)
    return {
        "get": next(item["status"]["phase"] for item in items if item["kind"] == "Model"),
        "models": rows[0]["phase"],
        "status": found["models"][0]["phase"],
        "healthy": (found["healthy"], status.code),
    }


def test_dead_model_is_unready_in_all_views(areal: Areal, elsewhere: Elsewhere) -> None:
    bad = {"get": "Degraded", "models": "Degraded", "status": "Degraded", "healthy": (False, 1)}
    assert phases(areal, elsewhere.url) == bad
    waited = areal("wait", "model/m", "--for", "ready", "--timeout", "900ms", "--gateway", elsewhere.url)
    assert waited.code == 7 and "w1 is dead" in waited.err
    elsewhere.answers["/workers"] = (200, {"workers": [worker(1, "ready")]})
    well = {"get": "Ready", "models": "Ready", "status": "Ready", "healthy": (True, 0)}
    assert phases(areal, elsewhere.url) == well
    assert areal("wait", "model/m", "--for", "ready", "--timeout", "9s", "--gateway", elsewhere.url).code == 0


def test_chat_with_unready_model_fails_at_once(areal: Areal, elsewhere: Elsewhere) -> None:
    refused = areal("inf", "chat", "-m", "hello", "--gateway", elsewhere.url)
    assert refused.code == 1 and "model/m is Progressing: 0 of 1 replicas are ready: w1 is dead" in refused.err


@pytest.mark.parametrize(
    "answer", [(403, {}), (503, {"error": {"message": "the router is away"}}), (404, "x"), (200, [])]
)
def test_model_without_visible_workers_is_unknown(areal: Areal, elsewhere: Elsewhere, answer: tuple[int, Any]) -> None:
    elsewhere.answers["/workers"] = answer
    unknown = {"get": "Unknown", "models": "Unknown", "status": "Unknown", "healthy": (False, 1)}
    assert phases(areal, elsewhere.url) == unknown


@pytest.mark.parametrize("flags", [("-l", "a=b"), ("--show-origin",), ("--show-defaults",)])
def test_flag_unsupported_by_gateway_is_refused(areal: Areal, elsewhere: Elsewhere, flags: tuple[str, ...]) -> None:
    refused = areal("get", "model", *flags, "--gateway", elsewhere.url)
    assert refused.code == 2 and "cannot be used with a gateway" in refused.err


def test_wait_fails_at_once_without_worker_permission(areal: Areal, elsewhere: Elsewhere) -> None:
    elsewhere.answers["/workers"] = (403, {})
    waited = areal("wait", "model/m", "--for", "ready", "--timeout", "9m", "--gateway", elsewhere.url)
    assert waited.code == 1 and "--api-key-file" in waited.err


def test_silent_router_is_given_up_after_deadline(
    areal: Areal, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal.cli.remote_view._LOOK_S", 0.2)
    del elsewhere.answers["/workers"]
    found = json.loads(areal("inf", "status", "--gateway", elsewhere.url, "-o", "json").out)
    assert found["models"][0]["phase"] == "Unknown" and found["phase"] == "Degraded"
    elsewhere.answers.clear()
    assert json.loads(areal("inf", "status", "--gateway", elsewhere.url, "-o", "json").out)["phase"] == "Unreachable"
    assert areal("get", "--gateway", elsewhere.url).code == 1


@pytest.mark.parametrize("answer", [[], "x", None, {"data": 3}, {"data": [1, {"id": None}, {}]}, 7])
def test_malformed_remote_answers_give_no_traceback(areal: Areal, elsewhere: Elsewhere, answer: Any) -> None:
    for path in ("/v1/models", "/workers", "/ready"):
        elsewhere.answers[path] = (200, answer)
    for words in (("get",), ("inf", "models"), ("inf", "status"), ("inf", "ps"), ("get", "processes")):
        shown = areal(*words, "--gateway", elsewhere.url)
        assert shown.code in (0, 1) and "Traceback" not in shown.err + shown.out, (words, shown)
