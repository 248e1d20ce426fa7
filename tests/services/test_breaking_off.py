"""Thousands of callers that break off at each stage of their call leave the memory of each service as it was."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.services.agent.gateway.socket_client import HANDSHAKE
from tests.services.agent.whole import start_agents
from tests.services.inference.sessions.recording_service import build_recording_service
from tests.services.processes import Process, Processes, wait_ready

_MIB = 2**20
_PART = os.urandom(_MIB)
_MOST_GROWTH = 64 * _MIB  # of 300 callers with a MiB each, and as much of 10,000; resident memory varies by 50
_AT_ONCE = 8
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Target:
    process: Process
    path: str
    key: str

    def head(self, size: int, *lines: str, path: str | None = None) -> bytes:
        first = f"POST {path or self.path} HTTP/1.1"
        fields = (first, "Host: x", f"Authorization: Bearer {self.key}", f"Content-Length: {size}", *lines, "", "")
        return "\r\n".join(fields).encode()

    def chunked(self, *lines: str) -> bytes:
        return self.head(0, "Transfer-Encoding: chunked", *lines).replace(b"Content-Length: 0\r\n", b"")

    def call(self, body: object) -> bytes:
        data = json.dumps(body).encode()
        return self.head(len(data)) + data


@pytest.fixture(scope="module")
def services(
    module_processes: Processes, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Target]]:
    folder = tmp_path_factory.mktemp("state")
    inference = build_recording_service(module_processes, tokenizer, folder / "recorded", replicas=1)
    agents = start_agents(module_processes, folder, inference.gateway)
    weights = module_processes.service("weight_update")
    wait_ready(weights)
    session = inference.begin()
    admin = module_processes.key
    yield {
        "gateway": Target(inference.gateway, "/v1/chat/completions", session.key),
        "data proxy": Target(inference.proxies[0], "/v1/chat/completions", session.key),
        "router": Target(inference.router, "/register_session", admin),
        "agent gateway": Target(agents.gateway, "/v1/responses", admin),
        "agent data proxy": Target(agents.proxies[0], "/rl/start_session", admin),
        "weight updates": Target(weights, "/connect", admin),
    }


def _handshake(target: Target, *lines: str) -> bytes:
    fields = [f"{name}: {value}" for name, value in HANDSHAKE.items()]
    return "\r\n".join(["GET /ws HTTP/1.1", *fields, *lines, "", ""]).encode()


def _unfinished_frame(size: int) -> bytes:
    return b"\x01\xff" + struct.pack(">Q", 40 * _MIB) + b"\0\0\0\0" + b"x" * size


def _fragments(count: int) -> bytes:
    """The first frame of a text and ``count`` that continue it, none of which is its last."""
    return b"".join(first + b"\xfe\x04\0\0\0\0\0" + b"x" * 1024 for first in (b"\x01", *[b"\x00"] * count))


_HALF_CLOSED = b""  # in place of a part: the caller stops sending, and still listens
_ZEROS = gzip.compress(bytes(30 * _MIB))
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
EVERYWHERE: dict[str, Callable[[Target], list[bytes]]] = {
    "header": lambda target: [b"POST / HTTP/1.1\r\nX-Long: " + _PART[:60_000].hex().encode()[:60_000]],
    "body": lambda target: [target.head(3 * _MIB), _PART],
    "body that is not read": lambda target: [target.head(3 * _MIB, path="/elsewhere"), _PART],
    "body that is not JSON": lambda target: [target.head(_MIB), _PART],
}
BY_OTHER_WAYS: dict[str, Callable[[Target], list[bytes]]] = {
    "chunk": lambda target: [target.chunked(), b"200000\r\n" + _PART],
    "chunks": lambda target: [target.chunked(), (b"400\r\n" + _PART[:1024] + b"\r\n") * 512],
    "compressed body": lambda target: [target.head(len(_ZEROS), "Content-Encoding: gzip") + _ZEROS],
    "compressed body that is cut": lambda target: [target.head(2 * len(_ZEROS), "Content-Encoding: gzip") + _ZEROS],
    "requests at once": lambda target: [target.call({"no": "sense"}) * 40, target.head(_MIB) + _PART[:1000]],
    "half of a body, half-closed": lambda target: [target.head(2 * _MIB) + _PART, _HALF_CLOSED],
    "whole body, half-closed": lambda target: [target.head(_MIB) + _PART, _HALF_CLOSED],
}
ONLY: dict[str, dict[str, Callable[[Target], list[bytes]]]] = {
    "gateway": {
        "answer": lambda target: [target.call(CHAT)],
        "stream": lambda target: [target.call({**CHAT, "stream": True})],
    },
    "data proxy": {
        "answer": lambda target: [target.call(CHAT)],
        "stream": lambda target: [target.call({**CHAT, "stream": True})],
    },
    "agent gateway": {
        "answer": lambda target: [target.call({"input": "hello", "user": "one"})],
        "stream": lambda target: [target.call({"input": "hello", "user": "one", "stream": True})],
        "frame of a stranger": lambda target: [_handshake(target), _unfinished_frame(_MIB)],
        "frame": lambda target: [
            _handshake(target, f"Authorization: Bearer {target.key}"),
            _unfinished_frame(_MIB),
        ],
        "fragments": lambda target: [
            _handshake(target, f"Authorization: Bearer {target.key}"),
            _fragments(1000),
        ],
        "fragments of a stranger": lambda target: [_handshake(target), _fragments(1000)],
    },
}
LONG = {**CHAT, "stream": True, "n": 16, "logprobs": True, "top_logprobs": 5}
for _name in ("gateway", "data proxy"):
    ONLY[_name]["stream that is not read"] = lambda target: [target.call(LONG)]


def break_off(target: Target, parts: list[bytes], count: int) -> None:
    """So many callers, a few at once, each of which sends the parts, may read a little, and is gone."""
    for first in range(0, count, _AT_ONCE):
        with contextlib.ExitStack() as stack:
            callers = [
                stack.enter_context(socket.create_connection(("127.0.0.1", target.process.port), timeout=20))
                for _ in range(min(_AT_ONCE, count - first))
            ]
            for part in parts:
                for caller in callers:
                    with contextlib.suppress(OSError):  # refused and closed
                        caller.sendall(part) if part else caller.shutdown(socket.SHUT_WR)
            if first % (2 * _AT_ONCE):
                select.select(callers, [], [], 0.05)
            for number, caller in enumerate(callers):
                if number % 2:
                    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def memory(services: dict[str, Target]) -> dict[str, int]:
    return {name: target.process.rss() for name, target in services.items()}


Stages = dict[str, Callable[[Target], list[bytes]]]


def check_flat(services: dict[str, Target], everywhere: Stages, count: int) -> None:
    """``count`` callers for each stage of each service."""
    for name, target in services.items():
        for stage, parts in (everywhere | ONLY.get(name, {})).items():
            break_off(target, parts(target), 2 * _AT_ONCE)
            before = memory(services)
            break_off(target, parts(target), count)

            wait_ready(target.process)
            growth = {each: now - before[each] for each, now in memory(services).items()}
            assert max(growth.values()) < _MOST_GROWTH, (name, stage, growth)


@pytest.mark.extended
def test_three_hundred_aborted_callers_leave_memory_flat(services: dict[str, Target]) -> None:
    check_flat(services, EVERYWHERE, 300)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_aborted_callers_leave_memory_flat(services: dict[str, Target]) -> None:
    everywhere = EVERYWHERE | BY_OTHER_WAYS
    stages = sum(len(everywhere | ONLY.get(name, {})) for name in services)
    check_flat(services, everywhere, 10_000 // stages + 1)
