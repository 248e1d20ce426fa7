"""Sessions that go on talking, each in a thread of its own; what each received is compared with what is exported."""

from __future__ import annotations

import http.client
import json
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tests.e2e.conftest import Box

CHAT = "/v1/chat/completions"


def ask(box: Box, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", box.port, timeout=120)
    try:
        headers = {"Authorization": f"Bearer {key or box.key}", "Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@dataclass
class Talk:
    """One session: the ids of its answered calls, and what went wrong."""

    session_id: str
    key: str
    answered: list[str] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def journal(self) -> str:
        return self.session_id.rsplit("-", 2)[1]


class Talks:
    """``count`` sessions, talking until the block is left; ``broken`` must then be empty."""

    def __init__(self, box: Box, count: int) -> None:
        self._box = box
        self._stop = threading.Event()
        self._progress = threading.Condition()
        self.broken: list[str] = []
        self.talks = [self._start() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._run, args=(talk,), name=talk.session_id, daemon=True) for talk in self.talks
        ]

    def _start(self) -> Talk:
        status, reply = ask(self._box, "POST", "/rl/start_session", {"task_id": "talk"})
        assert status == 201, reply
        (session,) = reply["sessions"]
        return Talk(session["session_id"], session["session_api_key"])

    def __enter__(self) -> Talks:
        for thread in self._threads:
            thread.start()
        self.wait_for_all(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=120)

    def wait_for_all(self, more: int) -> None:
        """Until every session has had ``more`` further answers (or one has broken)."""
        with self._progress:
            goals = [len(talk.answered) + more for talk in self.talks]

            def reached() -> bool:
                counts = [len(talk.answered) for talk in self.talks]
                return bool(self.broken) or all(map(int.__ge__, counts, goals))

            assert self._progress.wait_for(reached, timeout=90), [len(talk.answered) for talk in self.talks]

    def _run(self, talk: Talk) -> None:
        while not self._stop.is_set():
            trouble = self._turn(talk)
            with self._progress:
                if trouble:
                    self.broken.append(f"{talk.session_id}: {trouble}")
                self._progress.notify_all()
            if trouble:
                return

    def _turn(self, talk: Talk) -> str:
        if len(talk.messages) >= 8:
            talk.messages.clear()
        talk.messages.append({"role": "user", "content": str(len(talk.answered))})
        body = {"model": "reverse", "messages": talk.messages, "max_tokens": 4}
        try:
            status, reply = ask(self._box, "POST", CHAT, body, talk.key)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return repr(error)
        if status != 200:
            return f"{status} {reply}"
        talk.messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"] or "-"})
        talk.answered.append(reply["id"])
        return ""

    def assert_all_is_there_once(self) -> None:
        """Reward every session, export all of them in one call, and compare."""
        assert self.broken == []
        for talk in self.talks:
            status, reply = ask(self._box, "POST", "/rl/set_reward", {"reward": 1.0}, talk.key)
            assert (status, reply.get("interaction_count")) == (200, len(talk.answered)), reply
        request = {"session_ids": [talk.session_id for talk in self.talks]}
        status, exported = ask(self._box, "POST", "/export_trajectories", request)
        assert status == 200, exported
        found: dict[str, list[str]] = {talk.session_id: [] for talk in self.talks}
        for row in exported["rows"]:
            found[row["session_id"]].append(row["interaction_id"])
        assert found == {talk.session_id: talk.answered for talk in self.talks}
        assert exported["failures"] == []
        assert len(exported["traj"]["rewards"]) == sum(len(talk.answered) for talk in self.talks)
