"""A load of short turns: each connection talks, one conversation after another. Reads its orders as JSON from stdin.

    {"port", "keys", "connections", "turns", "stream", "episodes", "requests"}
        ->  {"mean_us", "p50_us", "p99_us", "failed", "seconds"}

A conversation opens with 200 characters; each further turn sends back all that was said and 200 characters more, as
agents do. Each takes the next of ``keys``, which are sessions'. With ``episodes`` a request is a whole episode: a
session is started, the conversation, a reward, the export; ``keys`` are then the admin's.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Generator, Iterator
from typing import Any, cast

import orjson

from benchmarks.relaying.driving import Make, run

_TEXT = "the quick brown fox jumps over the lazy dog and runs " * 4
_SAID = 200
_CHAT = "/v1/chat/completions"
_HEAD = (
    "POST {} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    "Authorization: Bearer {}\r\nContent-Length: {}\r\n\r\n"
)


class Talker(asyncio.Protocol):
    """Talks until ``tickets`` are gone."""

    def __init__(
        self,
        order: dict[str, Any],
        keys: Iterator[str],
        tickets: list[int],
        seconds: list[float],
        ended: asyncio.Future[None],
    ) -> None:
        self._keys = keys
        self._key = ""
        self._turns, self._stream = order["turns"], order["stream"]
        self._tickets, self._seconds, self._ended = tickets, seconds, ended
        self._messages: list[dict[str, str]] = []
        self._got = bytearray()
        self.failed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by their class

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self.failed += 1
            self._ended.set_result(None)

    def ask(self) -> None:
        if not self._tickets:
            self._ended.set_result(None)
            self._transport.close()
            return
        self._number = self._tickets.pop()
        if not self._messages or len(self._messages) >= 2 * self._turns:
            self._messages = []
            self._key = next(self._keys)
        self._since = time.perf_counter()
        self._say()

    def _say(self) -> None:
        self._messages.append({"role": "user", "content": f"{self._number} {_TEXT}"[:_SAID]})
        self._post(_CHAT, {"model": "mock", "messages": self._messages, "max_tokens": 64, "stream": self._stream})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        data = orjson.dumps(body)
        self._got.clear()
        self._transport.write(_HEAD.format(path, self._key, len(data)).encode() + data)

    def data_received(self, data: bytes) -> None:
        got = self._got
        got += data
        end = got.find(b"\r\n\r\n")
        if end < 0:
            return
        if self._stream and got.startswith(b"HTTP/1.1 200"):
            if len(got) < end + 9 or not got.endswith(b"0\r\n\r\n"):
                return
        else:
            at = got.lower().find(b"content-length:", 0, end)
            if len(got) < end + 4 + int(got[at + 15 : got.find(b"\r", at)]):
                return
        self._answered(got.startswith(b"HTTP/1.1 20"), bytes(got[end + 4 :]))

    def _answered(self, ok: bool, body: bytes) -> None:
        self._seconds.append(time.perf_counter() - self._since)
        if not ok:
            self.failed += 1
            self._messages = []
        else:
            self._messages.append({"role": "assistant", "content": self._answer(body)})
        self.ask()

    def _answer(self, body: bytes) -> str:
        if not self._stream:
            content: str = orjson.loads(body)["choices"][0]["message"]["content"]
            return content
        events = [orjson.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
        self.failed += b"data: [DONE]" not in body
        return "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])


class EpisodeTalker(Talker):
    """An episode a ticket. An answer that is none ends it, and counts."""

    def ask(self) -> None:
        self._messages = []
        super().ask()

    def _say(self) -> None:
        self._steps = self._episode()
        next(self._steps)

    def _episode(self) -> Generator[None, bytes, None]:
        admin = self._key
        self._post("/rl/start_session", {"task_id": f"episode-{self._number}"})
        (session,) = orjson.loads((yield))["sessions"]
        self._key = session["session_api_key"]
        for _ in range(self._turns):
            super()._say()
            self._messages.append({"role": "assistant", "content": self._answer((yield))})
        self._post("/rl/set_reward", {"reward": 1.0})
        yield
        self._key = admin
        self._post("/export_trajectories", {"session_ids": [session["session_id"]]})
        exported = orjson.loads((yield))
        self.failed += len(exported["traj"]["logprobs"]) < 1

    def _answered(self, ok: bool, body: bytes) -> None:
        try:
            if ok:
                self._steps.send(body)
                return
            self.failed += 1
        except StopIteration:
            pass
        self._seconds.append(time.perf_counter() - self._since)
        self.ask()


def _maker(order: dict[str, Any]) -> Make[Talker]:
    keys = itertools.cycle(order["keys"])
    kind = EpisodeTalker if order["episodes"] else Talker
    return lambda tickets, seconds, ended: kind(order, keys, tickets, seconds, ended)


if __name__ == "__main__":
    run(_maker)
