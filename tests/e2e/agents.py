"""An agent service on this box's port, and callers that talk to it; an acknowledged turn is in the history once."""

from __future__ import annotations

import http.client
import json
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import quote

from tests.e2e.conftest import Box

COUNTER = '''
import asyncio
from areal.api.agent import AgentResponse

class Counter:
    """Says how many turns it knows of; the message ``wait 3`` takes three seconds."""

    def __init__(self, name="one", seconds=0.0):
        self.name, self.seconds = name, seconds

    async def run(self, request, *, emitter):
        turns = sum(message["role"] == "user" for message in request.history)
        await emitter.emit_delta(f"{self.name} {turns} ")
        first, _, seconds = request.message.partition(" ")
        await asyncio.sleep(float(seconds) if first == "wait" else self.seconds)
        return AgentResponse(summary=f"{self.name} {turns} {request.message}")
'''


@dataclass
class Agents:
    """The service ``name`` of a box, and its agent's module ``counter`` beside the manifests."""

    box: Box
    name: str = "counter"

    @property
    def ref(self) -> str:
        return f"agentservice/{self.name}"

    @property
    def key(self) -> str:
        return (self.box.home / "credentials" / f"agentservice.{self.name}").read_text().strip()

    def manifest(self, *lines: str, name: str = "agents.yaml") -> str:
        """``lines``: further fields of the spec. Killed processes are soon back."""
        spec = [f"gateway: {{port: {self.box.port}}}", "restart: {backoff: {initialSeconds: 0.1}}", *lines]
        if not any(line.startswith(("agent:", "command:")) for line in lines):
            spec.append("agent: counter:Counter")
        head = f"apiVersion: areal.dev/v1alpha1\nkind: AgentService\nmetadata: {{name: {self.name}}}\nspec:\n"
        return self.box.write(head + "".join(f"  {line}\n" for line in spec), name)

    def apply(self, *lines: str) -> str:
        if not (self.box.folder / "counter.py").exists():
            self.box.write(COUNTER, "counter.py")
        return self.box.ok("apply", "-f", self.manifest(*lines)).out

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.box.port, timeout=60)

    def headers(self, session: str = "", repeat: str = "") -> dict[str, str]:
        """``repeat``: an Idempotency-Key."""
        named = {"X-AReaL-Session-Key": session, "Idempotency-Key": repeat}
        about = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        return about | {name: text for name, text in named.items() if text}

    def ask(
        self, method: str, path: str, body: Any = None, session: str = "", repeat: str = ""
    ) -> tuple[int, dict[str, Any]]:
        connection = self.connect()
        try:
            text = json.dumps(body) if body is not None else None
            connection.request(method, path, text, self.headers(session, repeat))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"{}")
        finally:
            connection.close()

    def say(self, message: str, session: str, repeat: str = "") -> str:
        """The text of a turn's answer."""
        status, answer = self.ask("POST", "/v1/responses", {"input": message}, session, repeat)
        assert status == 200, answer
        return text_of(answer)

    def show(self, session: str) -> dict[str, Any]:
        status, answer = self.ask("GET", f"/sessions/{quote(session, safe='')}")
        assert status == 200, answer
        return answer


def text_of(response: dict[str, Any]) -> str:
    """What the agent sent last; a sampled answer may be empty."""
    parts: list[str] = [part["text"] for item in response["output"] for part in item.get("content", ())]
    return parts[-1] if parts else ""


@dataclass
class Caller:
    """One session: the messages that were acknowledged, in their order, and the answers."""

    session: str
    sent: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)


class AgentLoad:
    """``count`` sessions that talk until the block is left; ``broken`` must then be empty. ``retries``: a turn whose
    connection broke, or that failed because a process was lost, is sent again with its Idempotency-Key."""

    def __init__(self, agents: Agents, count: int, *, retries: bool = False, prefix: str = "caller") -> None:
        self._agents = agents
        self._retries = retries
        self._stop = threading.Event()
        self._progress = threading.Condition()
        self.broken: list[str] = []
        self.callers = [Caller(f"{prefix}-{number}") for number in range(count)]
        self._threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in self.callers]

    def __enter__(self) -> AgentLoad:
        for thread in self._threads:
            thread.start()
        self.wait_for_all(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=60)

    def wait_for_all(self, more: int) -> None:
        """Until every session has had ``more`` further answers (or one has broken)."""
        with self._progress:
            goals = {caller.session: len(caller.sent) + more for caller in self.callers}

            def reached() -> bool:
                return bool(self.broken) or all(len(each.sent) >= goals[each.session] for each in self.callers)

            assert self._progress.wait_for(reached, timeout=120), self.broken
        assert not self.broken

    def _run(self, caller: Caller) -> None:
        while not self._stop.is_set():
            message = f"{caller.session} says {len(caller.sent)}"
            status, answer = self._ask(caller, message)
            while self._retries and status != 200:
                status, answer = self._ask(caller, message)
            with self._progress:
                if status == 200:
                    caller.sent.append(message)
                    caller.answers.append(text_of(answer))
                else:
                    self.broken.append(f"{message}: {status} {answer}")
                self._progress.notify_all()
            if status != 200:
                return

    def _ask(self, caller: Caller, message: str) -> tuple[int, dict[str, Any]]:
        repeat = f"{caller.session}-{len(caller.sent)}"
        try:
            return self._agents.ask("POST", "/v1/responses", {"input": message}, caller.session, repeat)
        except (OSError, http.client.HTTPException) as error:
            return 0, {"error": repr(error)}

    def check(self) -> None:
        """Every acknowledged turn is in its session's history, in its order, once."""
        assert self.broken == []
        for caller in self.callers:
            history = self._agents.show(caller.session)["history"]
            assert [each["content"] for each in history if each["role"] == "user"] == caller.sent
            assert [each["content"] for each in history if each["role"] == "assistant"] == caller.answers
            assert [answer.split(" ")[1] for answer in caller.answers] == [str(n) for n in range(len(caller.sent))]
