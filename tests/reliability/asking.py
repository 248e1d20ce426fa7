"""One model call as a caller sees it: an answer, or how it failed."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.services.processes import Answer, Process

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class ReplyChoice:
    """One choice of an answer."""

    text: str
    token_ids: tuple[int, ...]
    versions: tuple[int, ...]
    finish_reason: str | None


@dataclass(frozen=True)
class Reply:
    """A complete answer, streamed or not."""

    answer_id: str
    choices: tuple[ReplyChoice, ...]

    def interaction_id(self, choice: int) -> str:
        return self.answer_id if choice == 0 else f"{self.answer_id}-{choice}"


@dataclass(frozen=True)
class Failed:
    """``status`` 0: the connection ended. ``begun``: a part of the stream had arrived."""

    status: int
    code: str
    begun: bool = False


class Line:
    """One connection to a service. ``begun`` is set when the first line of a stream was read."""

    def __init__(self, front: Process) -> None:
        self.begun = threading.Event()
        self._connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)

    def pid(self) -> int:
        """The id of the process at the other end."""
        self._connection.request("GET", "/health")
        return int(json.loads(self._connection.getresponse().read())["pid"])

    def ask(self, key: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Reply | Failed:
        """One try, of a call with ``return_token_ids``. The connection is closed after it."""
        sent = {"Content-Type": "application/json", "Authorization": f"Bearer {key}", **headers}
        with contextlib.closing(self._connection):
            try:
                self._connection.request("POST", path, json.dumps(body).encode(), sent)
                response = self._connection.getresponse()
            except (OSError, http.client.HTTPException):
                return Failed(0, "lost")
            try:
                content = response.readline()
                self.begun.set()
                content += response.read()
            except (OSError, http.client.HTTPException):
                return Failed(0, "cut", begun=True)
        return understood(Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, content))


def ask(front: Process, key: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Reply | Failed:
    """One try, on a connection of its own."""
    return Line(front).ask(key, path, body, headers)


def understood(answer: Answer) -> Reply | Failed:
    if answer.status != 200:
        return Failed(answer.status, answer.json()["error"]["code"])
    if not answer.headers["content-type"].startswith("text/event-stream"):
        data = answer.json()
        return Reply(data["id"], tuple(map(_whole, data["choices"])))
    return _streamed(answer.body)


def _whole(choice: dict[str, Any]) -> ReplyChoice:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return ReplyChoice(text, tuple(choice["token_ids"]), tuple(choice["versions"]), choice["finish_reason"])


def _streamed(body: bytes) -> Reply | Failed:
    events = [line[6:].strip() for line in body.splitlines() if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        last = json.loads(events[-1]) if events else {}
        return Failed(0, last["error"]["code"] if "error" in last else "cut", begun=True)
    data = [json.loads(event) for event in events[:-1]]
    chunks = [choice for event in data for choice in event["choices"]]
    count = max(chunk["index"] for chunk in chunks) + 1
    return Reply(data[0]["id"], tuple(_joined([c for c in chunks if c["index"] == index]) for index in range(count)))


def _joined(chunks: list[dict[str, Any]]) -> ReplyChoice:
    texts = [chunk["text"] if "text" in chunk else chunk["delta"].get("content") or "" for chunk in chunks]
    token_ids = [token for chunk in chunks for token in chunk.get("token_ids", ())]
    versions = [version for chunk in chunks for version in chunk.get("versions", ())]
    finish = next((chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]), None)
    return ReplyChoice("".join(texts), tuple(token_ids), tuple(versions), finish)
