"""Rollouts without end: sessions that talk, streamed and not, are rewarded and exported, while others ask the model
without a session. Every answer is checked, every exported token compared with what its caller received.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tests.e2e.conftest import Box

CHAT = "/v1/chat/completions"
TURNS = 3
_DEADLINE_S = 120.0


class Broken(Exception):
    """Something a client should never see. ``interaction_id``: of a stream that was cut."""

    def __init__(self, message: str, interaction_id: str | None = None) -> None:
        super().__init__(message)
        self.interaction_id = interaction_id


@dataclass(frozen=True)
class Reply:
    """One answered call, as its caller received it. A stream has no prompt tokens."""

    interaction_id: str
    prompt_ids: list[int] | None
    token_ids: list[int]
    versions: list[int]
    text: str


@dataclass
class Client:
    box: Box
    key: str

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.box.host, self.box.port, timeout=_DEADLINE_S)
        try:
            headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise Broken(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()

    def post(self, path: str, body: Any, expect: int = 200) -> Any:
        status, raw = self.ask("POST", path, body)
        if status != expect:
            raise Broken(f"POST {path} -> {status} {raw.decode()}")
        return json.loads(raw)

    def chat(self, messages: list[dict[str, str]], *, stream: bool) -> Reply:
        body = {"model": "reverse", "messages": messages, "max_tokens": 6, "stream": stream, "return_token_ids": True}
        status, raw = self.ask("POST", CHAT, body)
        if status != 200:
            raise Broken(f"chat -> {status} {raw.decode()}")
        return _streamed(raw.decode()) if stream else _whole(json.loads(raw))


def _whole(data: dict[str, Any]) -> Reply:
    choice = data["choices"][0]
    text = choice["message"]["content"] or ""
    return Reply(data["id"], data["prompt_token_ids"], choice["token_ids"], choice["versions"], text)


def _streamed(text: str) -> Reply:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    if lines[-1:] != ["[DONE]"] or any("error" in chunk for chunk in chunks):
        raise Broken(f"a stream that is not whole: {text[-300:]}", chunks[0].get("id") if chunks else None)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return Reply(
        chunks[0]["id"],
        None,
        [token for choice in choices for token in choice.get("token_ids", ())],
        [version for choice in choices for version in choice.get("versions", ())],
        "".join(choice["delta"].get("content") or "" for choice in choices),
    )


@dataclass
class Session:
    """One session's life: trajectories of ``TURNS`` turns, each rewarded, and exported at once or at the end.

    ``cut``: streams that broke. One that was recorded before its last event could be sent is in the trajectory."""

    admin: Client
    number: int
    session_id: str = ""
    client: Client | None = None
    turns: list[Reply] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    kept: dict[int, list[Reply]] = field(default_factory=dict)  # by trajectory, not exported yet
    trajectories: int = 0
    calls: int = 0

    def begin(self) -> None:
        started = self.admin.post("/rl/start_session", {"task_id": f"load-{self.number}"}, expect=201)
        (session,) = started["sessions"]
        self.session_id = session["session_id"]
        self.client = Client(self.admin.box, session["session_api_key"])

    def step(self) -> None:
        """One more call, and what follows from it."""
        assert self.client is not None
        messages: list[dict[str, str]] = []
        for turn, reply in enumerate(self.turns):
            messages += [{"role": "user", "content": str(turn)}, {"role": "assistant", "content": reply.text or "-"}]
        messages.append({"role": "user", "content": str(len(self.turns))})
        try:
            self.turns.append(self.client.chat(messages, stream=self.calls % 2 == 0))
        except Broken as error:
            if error.interaction_id is not None:
                self.cut.add(error.interaction_id)
            raise
        self.calls += 1
        if len(self.turns) == TURNS:
            self._finish(self.client)

    def _finish(self, client: Client) -> None:
        done = client.post("/rl/set_reward", {"reward": float(self.number)})
        more = done["interaction_count"] - len(self.turns)
        if not 0 <= more <= len(self.cut) or done["trajectory_id"] != self.trajectories:
            raise Broken(f"{self.session_id}: rewarded {done}, after {len(self.turns)} turns of {self.trajectories}")
        self.kept[self.trajectories] = self.turns
        self.trajectories, self.turns = self.trajectories + 1, []
        if self.trajectories % 2 == 0:
            self.export(remove=False)

    def end(self) -> None:
        """Reward what is open, export the rest, and be gone."""
        assert self.client is not None
        if self.turns:
            self._finish(self.client)
        self.export(remove=True)

    def export(self, *, remove: bool) -> None:
        for number, turns in sorted(self.kept.items()):
            body = {"session_ids": [self.session_id], "trajectory_id": number, "remove_session": False}
            exported = self.admin.post("/export_trajectories", body)
            _compare(f"{self.session_id} trajectory {number}", exported, turns, self.cut, float(self.number))
            self.admin.post("/export_trajectories/ack", {"export_id": exported["export_id"]})
        self.kept.clear()
        if remove and self.client is not None:
            self.client.post("/rl/end_session", {})


def _compare(what: str, exported: dict[str, Any], turns: list[Reply], cut: set[str], reward: float) -> None:
    told = [reply.interaction_id for reply in turns]
    ids = [row["interaction_id"] for row in exported["rows"]]
    rows = [row for row, name in enumerate(ids) if name not in cut]
    if [ids[row] for row in rows] != told:
        raise Broken(f"{what}: {ids} was exported, {told} was answered")
    traj = exported["traj"]
    for row, reply in zip(rows, turns, strict=True):
        length, count = sum(traj["attention_mask"][row]), len(reply.token_ids)
        tokens, versions = traj["input_ids"][row][:length], traj["versions"][row][:length]
        if tokens[-count:] != reply.token_ids or reply.prompt_ids not in (None, tokens[:-count]):
            raise Broken(f"{what}: row {row} has other tokens than its caller received")
        if versions != [-1] * (length - count) + reply.versions:
            raise Broken(f"{what}: row {row} has other versions than its caller received")
    if traj["original_rewards"][-1] != reward:
        raise Broken(f"{what}: the reward is {traj['original_rewards'][-1]}, and was {reward}")


def _cut_short(what: str) -> bool:
    lost_proxy = what.startswith("a stream") and '"code":"worker_lost"' in what  # not begun, it goes to another
    return lost_proxy or '"code":"engine_failed"' in what


class Load:
    """``sessions`` sessions and ``strangers`` callers without one, each in a thread, until the block is left. What a
    session acknowledged and not yet exported is exported then. ``broken`` must be empty afterwards. A stream that had
    begun when its engine or data proxy was killed cannot be saved: where the test ``kills`` one, ``forgiven`` counts
    those that acknowledged it."""

    def __init__(self, box: Box, sessions: int = 4, strangers: int = 2) -> None:
        self.kills = False
        self.forgiven = 0
        self._admin = Client(box, box.key)
        self._stop = threading.Event()
        self._progress = threading.Condition()
        self._counts = [0] * (sessions + strangers)
        self.broken: list[str] = []
        self.sessions = [Session(self._admin, number) for number in range(sessions)]
        works = [*(self._session_work(each) for each in self.sessions), *(self._stranger(n) for n in range(strangers))]
        self._threads = [
            threading.Thread(target=self._run, args=(number, work), name=f"load-{number}", daemon=True)
            for number, work in enumerate(works)
        ]

    def __enter__(self) -> Load:
        for session in self.sessions:
            session.begin()
        for thread in self._threads:
            thread.start()
        self.wait_for_all(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=_DEADLINE_S)
        if kind is None and not self.broken:
            for session in self.sessions:
                self._note(-1, session.end)

    def wait_for_all(self, more: int) -> None:
        """Until every session and every stranger has had ``more`` further answers (or one has broken)."""
        with self._progress:
            goals = [count + more for count in self._counts]
            reached = self._progress.wait_for(
                lambda: bool(self.broken) or all(map(int.__ge__, self._counts, goals)), timeout=_DEADLINE_S
            )
            assert reached, f"of {goals} answers only {self._counts}"

    def _session_work(self, session: Session) -> Callable[[], None]:
        return session.step

    def _stranger(self, number: int) -> Callable[[], None]:
        def work() -> None:
            self._admin.chat([{"role": "user", "content": "1234"}], stream=number % 2 == 0)

        return work

    def _run(self, number: int, work: Callable[[], None]) -> None:
        while not self._stop.is_set() and not self.broken:
            self._note(number, work)

    def _note(self, number: int, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the end of a thread: whatever it is, the test gets it
            with self._progress:
                if self.kills and isinstance(error, Broken) and _cut_short(str(error)):
                    self.forgiven += 1
                else:
                    self.broken.append(str(error) if isinstance(error, Broken) else repr(error))
                self._progress.notify_all()
            return
        if number >= 0:
            with self._progress:
                self._counts[number] += 1
                self._progress.notify_all()
