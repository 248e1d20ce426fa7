"""Spans of real processes, as a collector of OTLP over HTTP gets them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from areal.client.command import free_port
from tests.e2e.conftest import ROOT, Box, make_box, tear_down

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
pytest.importorskip("opentelemetry.instrumentation.httpx")
pytestmark = pytest.mark.extended

JOB = "trainjob/learn-to-guess"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@dataclass
class Spans:
    """The spans that arrived, by their ids."""

    by_id: dict[bytes, Any] = field(default_factory=dict)
    services: dict[bytes, str] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = attributes(resource.resource)
            self.objects.add(about.get("areal.object", ""))
            for scope in resource.scope_spans:
                self.by_id |= {span.span_id: span for span in scope.spans}
                self.services |= {span.span_id: about["service.name"] for span in scope.spans}

    def named(self, name: str, trace: bytes | None = None) -> list[Any]:
        spans = sorted(self.by_id.values(), key=lambda span: span.start_time_unix_nano)
        return [span for span in spans if span.name == name and trace in (None, span.trace_id)]

    def path(self, span: Any) -> list[str]:
        """From the root of its trace to ``span``: names, each with its service."""
        above = self.path(self.by_id[span.parent_span_id]) if span.parent_span_id in self.by_id else []
        return [*above, f"{self.services[span.span_id].removeprefix('areal-')}: {span.name}"]


def attributes(holder: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in holder.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Spans, str]]:
    """What it has, and its address."""
    spans = Spans()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            spans.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield spans, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory, collector: tuple[Spans, str]) -> Iterator[Spans]:
    """Those of a job of one step whose episodes an AgentService runs, and of a caller with a trace of its own."""
    import openai

    found, address = collector
    box = replace(make_box(tmp_path_factory.mktemp("traced")), folder=ROOT)
    box.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = address
    try:
        box.ok(
            *("apply", "-f", "examples/agents/guess_number/train.yaml"),
            *("--set", f"inferenceservice/default:spec.gateway.port={box.port}"),
            *("--set", f"agentservice/guess-number:spec.gateway.port={free_port()}"),
            *("--set", f'{JOB}:spec.overrides=["total_train_steps=1"]'),
        )
        box.ok("wait", JOB, "--for", "completed", "--timeout", "200s")
        with openai.OpenAI(base_url=f"{box.url}/v1", api_key=box.key) as client:
            client.chat.completions.create(
                model="guess",
                messages=[{"role": "user", "content": "?"}],
                max_tokens=2,
                extra_headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
            )
        questions = tmp_path_factory.mktemp("questions") / "two.jsonl"
        questions.write_text('{"question": "?", "answer": "1"}\n{"question": "!", "answer": "2"}\n')
        options = (
            "--model",
            "guess",
            "--max-tokens",
            "2",
            "--reward",
            "number",
            "--output",
            str(questions.parent / "out"),
        )
        box.ok("inf", "collect", "--dataset", str(questions), *options)
        yield found_after_end(box, found)
    finally:
        tear_down(box)


def found_after_end(box: Box, found: Spans) -> Spans:
    """What has arrived once all processes have ended: a process sends its last spans when it ends."""
    box.ok("delete", "inferenceservice/default", "--cascade", "--yes")
    return found


def test_agent_episode_is_one_trace_from_rollout_to_engine(spans: Spans) -> None:
    rollout = next(each for each in spans.named("rollout") if attributes(each)["areal.outcome"] == "accepted")
    generate = spans.named("POST /generate", rollout.trace_id)[0]
    names = [
        "trainer: rollout",
        "trainer: sample",
        "gateway: POST /v1/responses",
        "data-proxy: POST /session/{key}/turn",
        "worker: POST /run",
        "worker: invoke_agent",
        "worker: POST",
        "gateway: POST /v1/chat/completions",
        "data-proxy: POST /v1/chat/completions",
        "data-proxy: chat guess",
        "engine: POST /generate",
    ]
    assert spans.path(generate) == names
    everything = [each for each in spans.by_id.values() if each.trace_id == rollout.trace_id]
    assert [each for each in everything if not each.parent_span_id] == [rollout]
    assert all(each.parent_span_id in spans.by_id for each in everything if each is not rollout), "a tree"
    assert all(each.start_time_unix_nano >= rollout.start_time_unix_nano for each in everything)
    assert {"Model/guess", "AgentService/guess-number", "TrainJob/learn-to-guess"} <= spans.objects


def test_episode_spans_have_model_weights_tokens_and_reward(spans: Spans) -> None:
    rollout = next(each for each in spans.named("rollout") if attributes(each)["areal.outcome"] == "accepted")
    call = attributes(spans.named("chat guess", rollout.trace_id)[0])
    assert call["gen_ai.operation.name"] == "chat"
    assert call["gen_ai.request.model"] == call["gen_ai.response.model"] == "guess"
    assert call["gen_ai.usage.input_tokens"] >= 1
    assert 1 <= call["gen_ai.usage.output_tokens"] <= call["gen_ai.request.max_tokens"] == 2
    assert call["areal.weight_version"] == attributes(rollout)["areal.weight_version"] == 0
    rewards = [attributes(each)["areal.reward"] for each in spans.named("set_reward", rollout.trace_id)]
    assert len(rewards) == 8, "one a sample"
    assert attributes(rollout)["areal.reward"] == pytest.approx(sum(rewards) / 8)


def test_training_step_span_links_to_its_rollouts(spans: Spans) -> None:
    (step,) = (each for each in spans.named("training_step") if not each.parent_span_id)
    assert attributes(step)["areal.step"] == 1
    assert len(step.links) == 14, "the batch"
    for link in step.links:
        assert spans.by_id[link.span_id].name == "rollout"
        (own,) = spans.named("training_step", link.trace_id)
        assert own.parent_span_id == link.span_id
        assert own.links[0].span_id == step.span_id


def test_call_with_traceparent_joins_callers_trace(spans: Spans) -> None:
    (generate,) = spans.named("POST /generate", bytes.fromhex(TRACE))
    names = ["POST /v1/chat/completions", "POST /v1/chat/completions", "chat guess", "POST /generate"]
    assert [each.partition(": ")[2] for each in spans.path(generate)] == names
    (first,) = (each for each in spans.by_id.values() if each.parent_span_id == bytes.fromhex(PARENT))
    assert first.trace_id == bytes.fromhex(TRACE)
    assert attributes(first)["http.response.status_code"] == 200


def test_weight_update_is_one_trace_from_gateway_to_engine(spans: Spans) -> None:
    updates = spans.named("weight_update")
    assert {attributes(each)["areal.weight_version"] for each in updates} >= {1}
    last = attributes(updates[-1])
    assert last["areal.replicas"] == 1 and last["areal.bytes"] > 100_000 and last["areal.pause_ms"] > 0
    below = [each for each in spans.by_id.values() if each.trace_id == updates[-1].trace_id]
    paths = {tuple(spans.path(each)) for each in below}
    assert any(
        path[0] == "weight-update: weight_update" and path[-1] == "data-proxy: POST /weights/replace" for path in paths
    )
    assert any(path[-1] == "engine: POST /load_weights" for path in paths), paths


def test_collected_episode_is_one_trace_from_command_to_engine(spans: Spans) -> None:
    mine = [each for each in spans.named("rollout") if spans.services[each.span_id] == "areal-collect"]
    assert len(mine) == 2 and all(attributes(each)["areal.outcome"] == "accepted" for each in mine)
    generate = spans.named("POST /generate", mine[0].trace_id)[0]
    path = spans.path(generate)
    assert path[0] == "collect: rollout" and path[-3:] == [
        "data-proxy: POST /v1/chat/completions",
        "data-proxy: chat guess",
        "engine: POST /generate",
    ]
    (reward,) = spans.named("reward", mine[0].trace_id)
    assert spans.path(reward)[0] == "collect: rollout"
