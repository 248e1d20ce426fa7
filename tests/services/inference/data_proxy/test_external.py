"""A data proxy before an external OpenAI-compatible API: here that is another gateway."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from areal.resources.addresses import UrlError, parse_external_url
from areal.services.http.process import serve_options
from areal.services.http.tasks import happens
from areal.services.inference.data_proxy.external import chat_body
from areal.services.inference.data_proxy.process import data_proxy
from areal.wire.processes import DataProxyConfig
from tests.services.inference.running_service import CHAT, Service
from tests.services.processes import Process, Processes, Stream, chat_text, script, wait_ready, wait_until

GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
BODY = {"model": "friend", "messages": [{"role": "user", "content": "Hello"}]}


def external(processes: Processes, url: str, key: str | None, *flags: str) -> Process:
    """A data proxy that knows ``tiny`` of the API at ``url`` as ``friend``."""
    argv = ("--model", "friend", "--engine", "external", "--engine-url", url, "--provider-model", "tiny", *flags)
    env = {"AREAL_PROVIDER_API_KEY": key} if key else {}
    return processes.service("data_proxy", *argv, env=env)


@pytest.fixture(scope="module")
def friend(shared_service: Service, module_processes: Processes) -> Process:
    proxy = external(module_processes, shared_service.gateway.url, shared_service.key)
    wait_ready(proxy)
    return proxy


def test_external_model_answers_under_served_name(
    service: Service, friend: Process, module_processes: Processes
) -> None:
    answer = friend.call("POST", CHAT, BODY, key=module_processes.key)
    assert answer.status == 200, answer.body
    assert answer.json()["choices"][0]["message"]["content"] == "Hello there, friend!"
    assert int(answer.headers["x-areal-overhead-us"]) > 0


@pytest.mark.parametrize(
    "trace",
    [
        {"traceparent": GIVEN.upper()},
        {"traceparent": GIVEN[:-1]},
        {"traceparent": "ff" + GIVEN[2:]},
        {"traceparent": "00-" + "0" * 32 + GIVEN[35:]},
        {"traceparent": f"{GIVEN}, {GIVEN}"},
        {"traceparent": f"01{GIVEN[2:]}-\u2028".encode()},
        {"traceparent": GIVEN, "tracestate": b"a=1," * 15_000},
        {"traceparent": GIVEN, "tracestate": "a=1\u2028b=2".encode()},
        {"traceparent": GIVEN, "tracestate": b"a=\xff"},
    ],
)
def test_external_model_accepts_any_trace_headers(
    service: Service, friend: Process, module_processes: Processes, trace: dict[str, str | bytes]
) -> None:
    answer = friend.call("POST", CHAT, BODY, key=module_processes.key, headers=trace)
    assert answer.status == 200, answer.body


def test_external_model_streams(service: Service, friend: Process, module_processes: Processes) -> None:
    events = list(Stream(friend.port, CHAT, BODY, module_processes.key).events())
    assert chat_text(events) == "Hello there, friend!" and events[-1] == "[DONE]"


def test_unknown_fields_reach_external_model(service: Service, friend: Process, module_processes: Processes) -> None:
    body = {**BODY, "chat_template_kwargs": {"enable_thinking": False}}
    assert friend.call("POST", CHAT, body, key=module_processes.key).status == 200
    assert service.engine_saw()["input_ids"]


@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty", "seed", "top_logprobs"])
@pytest.mark.parametrize("value", [0, 0.0, -0.0])
def test_external_api_receives_fields_set_to_zero(name: str, value: float) -> None:
    chat: dict[str, Any] = {"messages": [], "stop": [], "tools": None, "stream": False, name: value}
    assert chat_body(chat) == {"messages": [], name: value}


def test_external_refusal_is_passed_through(service: Service, friend: Process, module_processes: Processes) -> None:
    answer = friend.call("POST", CHAT, {**BODY, "messages": []}, key=module_processes.key)
    assert answer.status == 400 and answer.json()["error"]["param"] == "messages"


def test_broken_external_stream_relays_error_event(
    service: Service, friend: Process, module_processes: Processes
) -> None:
    script(service.engine, error_after=3)
    events = list(Stream(friend.port, CHAT, BODY, module_processes.key).events())
    assert events[-1]["error"]["code"] == "engine_failed"


def test_external_checks_model_name_and_key(friend: Process, module_processes: Processes) -> None:
    assert friend.call("POST", CHAT, {**BODY, "model": "tiny"}, key=module_processes.key).status == 404
    assert friend.call("POST", CHAT, BODY).status == 401


def test_external_key_may_come_from_file(shared_service: Service, processes: Processes, tmp_path: Path) -> None:
    file = tmp_path / "provider.key"
    file.write_text(shared_service.key + "\n")
    wait_ready(external(processes, shared_service.gateway.url, None, "--provider-key-file", str(file)))


def test_wrong_provider_key_is_the_not_ready_reason(shared_service: Service, processes: Processes) -> None:
    proxy = external(processes, shared_service.gateway.url, "wrong")
    wait_until(lambda: "does not take the key" in (proxy.call("GET", "/ready").json()["reason"] or ""))
    assert "wrong" not in proxy.call("GET", "/ready").body.decode()


async def test_lost_external_model_is_reported_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    config = DataProxyConfig(port=0, model="friend", engine="external", engine_url=url)
    async with data_proxy(config, serve_options(config)) as service, service.lifespan():
        assert await happens(service.lifetime.news, 5.0)
        assert "does not answer" in str(service.readiness()["reason"])


def test_external_failure_is_not_retried(service: Service, friend: Process, module_processes: Processes) -> None:
    router = module_processes.router()
    gateway = module_processes.gateway(router)
    module_processes.register(router, friend, model="friend")
    wait_until(lambda: gateway.call("POST", CHAT, BODY, key=module_processes.key).status == 200)
    script(service.engine, cut_after=0)
    answer = gateway.call("POST", CHAT, BODY, key=module_processes.key)
    assert answer.status == 502 and answer.headers["x-areal-attempts"] == "1"


class Upstream(BaseHTTPRequestHandler):
    """Sends what a client's model name says, and ends the connection."""

    protocol_version = "HTTP/1.1"
    calls = 0
    beta: str | None = None  # of the last call

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        Upstream.calls, Upstream.beta = Upstream.calls + 1, self.headers["anthropic-beta"]
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        self.close_connection = True
        if question == "drop":
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        chunks = {"cut": (None,), "done": (None,), "whole": (None, "stop"), "empty": ()}[question]
        for finish in chunks:
            chunk = {"id": "c", "choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": finish}]}
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        if question == "done":
            self.wfile.write(b"data: [DONE]\n\n")


def test_truncated_external_stream_fails_and_is_not_retried(processes: Processes) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Upstream) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        proxy = external(processes, f"http://127.0.0.1:{server.server_port}", "k", "--allow-private")
        router = processes.router()
        gateway = processes.gateway(router)
        processes.register(router, proxy, model="friend")
        wait_until(lambda: gateway.call("GET", "/ready", key=processes.key).status == 200)

        def ask(question: str, stream: bool = True) -> tuple[int, bytes]:
            body = {"model": "friend", "messages": [{"role": "user", "content": question}], "stream": stream}
            answer = gateway.call("POST", CHAT, body, key=processes.key)
            return answer.status, answer.body

        status, text = ask("cut")
        assert status == 200 and b"the external API failed: the stream was cut" in text
        assert ask("empty")[0] == 502
        status, text = ask("whole")
        assert status == 200 and b"error" not in text
        before = Upstream.calls
        assert ask("drop", stream=False)[0] == 502 and Upstream.calls == before + 1
        server.shutdown()


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "done"}]}, b"[DONE]"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "done"}], "max_tokens": 9}, b"message_stop"),
        ("/v1/responses", {"input": "done"}, b"response.completed"),
    ],
)
def test_external_stream_without_finish_reason_is_complete(
    processes: Processes, path: str, body: dict[str, Any], end: bytes
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Upstream) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        proxy = external(processes, f"http://127.0.0.1:{server.server_port}", "k", "--allow-private")
        wait_ready(proxy)
        answer = proxy.call("POST", path, {"model": "friend", "stream": True, **body}, key=processes.key)
        assert answer.status == 200 and end in answer.body and b"was cut" not in answer.body
        server.shutdown()


@pytest.mark.extended
def test_anthropic_beta_header_reaches_provider(processes: Processes) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Upstream) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ("--allow-private", "--provider-api", "anthropic")
        proxy = external(processes, f"http://127.0.0.1:{server.server_port}", "k", *flags)
        router = processes.router()
        gateway = processes.gateway(router)
        processes.register(router, proxy, model="friend")
        wait_until(lambda: gateway.call("GET", "/ready", key=processes.key).status == 200)
        body = {"model": "friend", "max_tokens": 5, "messages": [{"role": "user", "content": "drop"}]}
        gateway.call("POST", "/v1/messages", body, key=processes.key, headers={"anthropic-beta": "context-1m"})
        assert Upstream.beta == "context-1m"
        server.shutdown()


def test_unreachable_external_api_is_503(processes: Processes) -> None:
    proxy = external(processes, "http://127.0.0.1:9", "k")
    answer = proxy.call("POST", CHAT, BODY, key=processes.key)
    assert answer.status == 503 and answer.json()["error"]["code"] == "engine_unavailable"


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("https://api.example.com", "https://api.example.com/v1"),
        ("https://api.example.com/v1/", "https://api.example.com/v1"),
        ("http://127.0.0.1:8000/openai/v1", "http://127.0.0.1:8000/openai/v1"),
    ],
)
def test_external_url_is_the_apis_base(given: str, used: str) -> None:
    assert parse_external_url(given).text == used


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc", "api.example.com", "http://u:p@h/v1", "http://169.254.169.254/v1", "http://[fe80::1]/v1"),
        *("http://10.0.0.1/v1", "http://2130706433/v1", "http://0.0.0.0:80"),
    ],
)
def test_rejects_invalid_or_metadata_external_url(url: str) -> None:
    with pytest.raises(UrlError):
        parse_external_url(url)
