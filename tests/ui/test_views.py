"""The views of plan, top and weights, over homes on disk and a running job."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from areal.errors import NotFound, UsageFault
from areal.state.home import Home
from areal.state.job_metrics import last_steps
from areal.state.records import StoredObject
from areal.ui.jobs import FileMemo
from areal.ui.views import ViewContext, chat, weights
from areal.ui.views import home as home_view
from tests.trajectories.test_steps import sample
from tests.ui.conftest import Job, Page, eventually

Record = Callable[..., StoredObject]
SERVICE = """apiVersion: areal.dev/v1alpha1
kind: InferenceService
metadata: {name: default}
spec: {gateway: {port: 18080}}
"""


def test_manifest_plan_has_actions_and_steps_with_causes(page: Page, tmp_path: Path) -> None:
    (tmp_path / "service.yaml").write_text(SERVICE)
    found = page.read("plan", path=str(tmp_path / "service.yaml"))
    assert [(each["ref"], each["action"]) for each in found["objects"]] == [("InferenceService/default", "create")]
    assert found["ops"] and all(op["cause"] for op in found["ops"])


def test_plan_of_pasted_text_equals_plan_of_file(home: Home, tmp_path: Path) -> None:
    (tmp_path / "service.yaml").write_text(SERVICE)
    by_path = home_view.plan(ViewContext(home, {"path": str(tmp_path / "service.yaml")}))
    pasted = home_view.plan(ViewContext(home, {}, {"text": SERVICE}))
    assert pasted["objects"] == by_path["objects"] and pasted["ops"] == by_path["ops"]


def test_fault_of_a_manifest_has_its_line(home: Home) -> None:
    (fault,) = home_view.plan(ViewContext(home, {}, {"text": SERVICE.replace("gateway", "gatewy")}))["faults"]
    assert fault["line"] == 4 and "gatewy" in fault["path"]


def test_changed_field_shows_both_values_and_update_class(home: Home, record: Record) -> None:
    record("InferenceService", "default", {"gateway": {"port": 18080}})
    found = home_view.plan(ViewContext(home, {"assume": "1"}, {"text": SERVICE.replace("18080", "18081")}))
    (item,) = [each for each in found["objects"] if each["ref"] == "InferenceService/default"]
    (change,) = item["changes"]
    assert (change["path"], change["old"], change["new"]) == ("spec.gateway.port", 18080, 18081)
    assert item["decidedBy"] == "spec.gateway.port"


@pytest.mark.parametrize("body", [{}, {"text": " "}, {"text": 3}])
def test_empty_manifest_is_refused(home: Home, body: Any) -> None:
    with pytest.raises(UsageFault, match="no manifest"):
        home_view.plan(ViewContext(home, {}, body))


def test_relative_path_is_refused(home: Home) -> None:
    with pytest.raises(UsageFault, match="absolute"):
        home_view.plan(ViewContext(home, {"path": "service.yaml"}))


def test_top_measures_a_running_job_and_keeps_its_history(page: Page, job: Job) -> None:
    (row,) = page.read("top")["processes"]
    assert row["owner"] == "TrainJob/noisy" and row["memoryBytes"] > 1 << 20 and row["cpuPercent"] is not None
    later = eventually(lambda: len((it := page.read("top")["processes"][0])["history"]["at"]) > 1 and it)
    assert len(later["history"]["cpuPercent"]) == len(later["history"]["at"])


def test_job_updates_come_from_metrics_newest_first(home: Home) -> None:
    folder = home.jobs / "learn"
    folder.mkdir(parents=True)
    lines = [{"step": n, "attempt": 1, "time": 100.0 + n, "version": n, "weights/ms": 5.0 * n} for n in range(1, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [{"step": 0}, *lines]))
    found = weights.read(ViewContext(home))
    assert [(each["version"], each["ms"]) for each in found["updates"]] == [(3, 15.0), (2, 10.0), (1, 5.0)]
    assert found["replicas"] == [] and found["unseen"] == []


def test_update_and_token_history_is_read_from_job_files(home: Home) -> None:
    folder = home.jobs / "learn"
    (folder / "trajectories").mkdir(parents=True)
    entry = {"began": 1.0, "at": 2.0, "pair": "p", "model": "m", "joined": False, "bytes": 4, "error": None}
    lines = [json.dumps({**entry, "version": n, "replicas": {"http://w": 1.0 if n else None}}) for n in (0, 1)]
    (folder / "weight_updates.jsonl").write_text("\n".join(lines) + '\n{"torn')
    found = weights.read(ViewContext(home))["history"]
    assert [(each["job"], each["version"], each["replicas"]) for each in found] == [
        ("learn", 0, {"http://w": None}),
        ("learn", 1, {"http://w": 1.0}),
    ]
    episode = sample("g", 1, 1.0)
    for step in (1, 2):
        path = folder / "trajectories" / f"trajectories-{step}.jsonl"
        path.write_text(json.dumps(episode.document()) + "\n")
    (job,) = weights.read(ViewContext(home, {"tokens": "1"}))["jobs"]
    sampled = [version for row in episode.interactions for version in row.versions if version >= 0]
    assert job["steps"] == [1, 2] and job["whole"]
    assert sum(each["tokens"] for each in job["versions"]) == 2 * len(sampled) > 0
    assert [each["version"] for each in job["versions"]] == sorted(set(sampled), reverse=True)


class _Gateway(BaseHTTPRequestHandler):
    pairs = [{"pair_name": "p", "mode": "disk", "state": "failed", "version": 2, "error": "a worker refused"}]

    def do_GET(self) -> None:
        body = json.dumps({"pairs": self.pairs}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def test_pairs_are_read_from_job_gateway_and_dead_one_is_named(home: Home) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Gateway)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        for job, port in (("alive", server.server_port), ("killed", 1)):
            (home.jobs / job).mkdir(parents=True)
            about = {"url": f"http://127.0.0.1:{port}", "pid": 1, "admin_key_file": None}
            (home.jobs / job / "weight_update.json").write_text(json.dumps(about))
        found = weights.read(ViewContext(home))
    finally:
        server.shutdown()
        server.server_close()
    assert [(pair["job"], pair["error"]) for pair in found["pairs"]] == [("alive", "a worker refused")]
    assert len(found["unseen"]) == 1 and "killed" in found["unseen"][0]


class _Other(_Gateway):
    """A server that took the port of one that is gone."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"hi")


def test_other_server_in_place_of_gateway_is_named(home: Home, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    from areal.reconcilers.home_view import HomeView

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Other)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    record("InferenceService", "default", {})
    home.credentials.mkdir(parents=True, exist_ok=True)
    (home.credentials / "default").write_text("the-key-of-the-service")
    monkeypatch.setattr(HomeView, "address", lambda self, ref: url)
    try:
        (home.jobs / "killed").mkdir(parents=True)
        (home.jobs / "killed" / "weight_update.json").write_text(json.dumps({"url": url, "admin_key_file": None}))
        found = weights.read(ViewContext(home))
        models = chat.models(ViewContext(home))
    finally:
        server.shutdown()
        server.server_close()
    assert found["replicas"] == [] and found["pairs"] == []
    assert [sentence.partition(":")[0] for sentence in found["unseen"]] == [
        "InferenceService/default",
        "TrainJob/killed",
    ]
    assert models["models"] == [] and "without models" in models["unseen"][0]


class _Models(BaseHTTPRequestHandler):
    asked: list[Any] = []

    def do_GET(self) -> None:
        self._send({"data": [{"id": "qwen"}]})

    def do_POST(self) -> None:
        self.asked.append(
            (self.headers["Authorization"], json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        )
        content = [{"token": "hi", "logprob": -0.5}]
        choice = {"delta": {"content": "hi"}, "logprobs": {"content": content}, "finish_reason": "stop"}
        chunks = [{"choices": [choice]}, {"choices": [], "usage": {"completion_tokens": 1}}]
        self._write("".join(f"data: {json.dumps(each)}\n\n" for each in chunks).encode() + b"data: [DONE]\n\n")

    def _send(self, document: Any) -> None:
        self._write(json.dumps(document).encode())

    def _write(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def served(home: Home, record: Record, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A service whose gateway is a stand-in, with a key in the home."""
    from areal.reconcilers.home_view import HomeView

    record("InferenceService", "default", {})
    home.credentials.mkdir(parents=True, exist_ok=True)
    (home.credentials / "default").write_text("the-key-of-the-service")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Models)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(HomeView, "address", lambda self, ref: f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


def test_chat_lists_models_answers_with_logprobs_and_hides_key(served: Any, home: Home) -> None:
    choice = {"service": "default", "model": "qwen", "version": None}
    assert chat.models(ViewContext(home))["models"] == [choice]
    body = {"service": "default", "model": "qwen", "messages": [{"role": "user", "content": "1"}], "temperature": 0.5}
    found = list(chat.answer(ViewContext(home, {}, body)))
    assert found[0] == {"text": "hi", "tokens": [{"text": "hi", "logprob": -0.5, "version": None}]}
    assert found[-1]["finishReason"] == "stop" and found[-1]["usage"] == {"completion_tokens": 1}
    authorization, sent = _Models.asked.pop()
    assert authorization == "Bearer the-key-of-the-service" and sent["temperature"] == 0.5 and "max_tokens" not in sent
    assert "the-key" not in json.dumps(found)


@pytest.mark.parametrize(
    "wrong", [{"temperature": 3}, {"maxTokens": 0}, {"messages": []}, {"model": None}, {"topP": True}]
)
def test_chat_rejects_invalid_requests(served: Any, home: Home, wrong: dict[str, Any]) -> None:
    body = {"service": "default", "model": "qwen", "messages": [{"role": "user", "content": "1"}], **wrong}
    with pytest.raises(UsageFault):
        next(chat.answer(ViewContext(home, {}, body)))


def test_last_steps_are_read_from_end_of_file(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step, "attempt": 1}) + "\n" for step in range(10_000)))
    found = [each["step"] for each in last_steps(file, 1000)]
    assert found == list(range(found[0], 10_000)) and 10 < len(found) < 60
    assert last_steps(tmp_path / "none", 1000) == []


def test_memo_reloads_file_only_when_changed(tmp_path: Path) -> None:
    loads: list[Path] = []

    def load(path: Path) -> str:
        loads.append(path)
        return path.read_text()

    memo = FileMemo[str](load, most=1)
    file = tmp_path / "a"
    file.write_text("one")
    assert memo.get(file) == memo.get(file) == "one" and len(loads) == 1
    file.write_text("three")
    assert memo.get(file) == "three"


def test_missing_object_is_not_found(home: Home) -> None:
    with pytest.raises(NotFound):
        home_view.described(ViewContext(home, {"kind": "model", "name": "absent"}))
