"""Generated histories of a running data plane against a simple model.

Callers start sessions, talk, branch, repeat calls as SDKs do, sample twice on purpose, reward, end, export; weights are
swapped, generation is paused, processes are killed and come back. After every step the sessions that it touched say
what the model says, and every exported token is what the engine's own log says.

The processes live as long as the test; each example has sessions of its own.
"""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.reliability.asking import CHAT, COMPLETIONS, Failed, Reply, ask
from tests.reliability.fleet import Fleet, Member
from tests.reliability.model import Call, Export, Session, Turn, check_rows, requests_of
from tests.services.inference.recorder.rollouts import begin_group
from tests.services.inference.running_service import later
from tests.services.processes import Stream, wait_until

TEXTS = st.sampled_from(["Hello", "How are you?", "naïve 日本 🎉"])
REWARDS = st.sampled_from([0.0, 0.25, 1.0, -1.0])
VERSIONS = st.integers(0, 5)
RETRY = {"x-stainless-retry-count": "1"}
_serials = itertools.count()


class DataPlaneMachine(RuleBasedStateMachine):
    """``kills``: how many processes an example may kill. Use it through ``machine_of``."""

    fleet: Fleet
    kills: int

    def __init__(self) -> None:
        super().__init__()
        self.kills_left = self.kills
        self.sessions: list[Session] = []
        self.exports: list[Export] = []

    @initialize(size=st.integers(1, 2))
    def begin(self, size: int) -> None:
        self._start(size)

    # -- what the rules are made of

    def live(self) -> list[Session]:
        return [session for session in self.sessions if not session.removed]

    def _start(self, size: int) -> None:
        self.sessions += [Session(each) for each in begin_group(self.fleet.front, self.fleet.key, size, online=False)]

    def _pick(self, data: st.DataObject) -> Session:
        return data.draw(st.sampled_from(self.live()), "session")

    def _some_call(self, data: st.DataObject, session: Session, *, keyed: bool = False) -> tuple[Call, Turn | None]:
        """A call that may go on from any turn so far, and that turn."""
        turns = session.turns()
        base = data.draw(st.sampled_from([None, turns[-1], *turns]) if turns else st.none(), "base")
        body: dict[str, Any] = {"stream": data.draw(st.booleans(), "stream"), "n": data.draw(st.integers(1, 2), "n")}
        body |= {
            "return_token_ids": True,
            **self._sampling(),
            "max_tokens": data.draw(st.sampled_from([8, 64]), "max_tokens"),
        }
        key = f"key-{next(_serials)}" if keyed or data.draw(st.booleans(), "keyed") else None
        if base is not None and base.call.path == COMPLETIONS:
            body["prompt"] = [*self.fleet.witness.truth(base.name).tokens, 5, 6]
        elif base is None and data.draw(st.integers(0, 3), "plain") == 0:
            body["prompt"] = [7, 8, data.draw(st.integers(0, 9), "token")]
        else:
            before = base.messages() if base is not None else []
            body["messages"] = [*before, {"role": "user", "content": data.draw(TEXTS, "text")}]
        return Call(CHAT if "messages" in body else COMPLETIONS, body, key), base

    def _sampling(self) -> dict[str, Any]:
        """No answer of a real engine may be so short that another one is the same."""
        return {"ignore_eos": True} if self.fleet.weights else {}

    def _ask(self, session: Session, call: Call, **headers: str) -> Reply | Failed:
        return ask(self.fleet.front, session.rollout.key, call.path, call.body, {**call.headers, **headers})

    def _answered(self, session: Session, call: Call, base: Turn | None, reply: Reply | Failed) -> None:
        """``reply`` is the answer of a call that was sampled and recorded."""
        assert isinstance(reply, Reply), reply
        assert not any(turn.reply.answer_id == reply.answer_id for each in self.sessions for turn in each.turns())
        for number, choice in enumerate(reply.choices):
            sampled = self.fleet.witness.truth(reply.interaction_id(number)).output
            assert list(choice.token_ids) == sampled.token_ids
            assert list(choice.versions) == sampled.versions
        session.record(call, reply, base)
        self._check(session)

    def _check(self, session: Session) -> None:
        """The session says what the model says."""
        answer = self.fleet.admin("GET", f"/rl/sessions/{session.name}")
        if session.removed:
            assert answer.status == 404
            return
        reply = answer.json()
        assert reply["state"] == ("ended" if session.ended else "active")
        held = [(number, each) for number, each in enumerate(session.trajectories) if each.held]
        assert [each["trajectory_id"] for each in reply["trajectories"]] == [number for number, _ in held]
        for shown, (_, trajectory) in zip(reply["trajectories"], held, strict=True):
            assert shown["state"] == ("taken" if trajectory.taken else "ready" if trajectory.ready else "open")
            assert [(each["interaction_id"], each["parent_id"], each["reward"]) for each in shown["interactions"]] == [
                (turn.name, turn.parent.name if turn.parent else None, turn.reward) for turn in trajectory.turns
            ]

    # -- what callers do

    @rule(size=st.integers(1, 3))
    @precondition(lambda self: len(self.live()) < 4)
    def start(self, size: int) -> None:
        self._start(size)

    @rule(data=st.data())
    @precondition(lambda self: self.live())
    def call(self, data: st.DataObject) -> None:
        session = self._pick(data)
        call, base = self._some_call(data, session)
        reply = self._ask(session, call)
        if session.ended:
            assert reply == Failed(409, "session_ended")
        else:
            self._answered(session, call, base, reply)

    @rule(data=st.data(), values=st.lists(REWARDS, min_size=1, max_size=3))
    @precondition(lambda self: any(not each.ended for each in self.live()))
    def converse(self, data: st.DataObject, values: list[float]) -> None:
        """A tree of several turns, with rewards in the middle of it."""
        session = data.draw(st.sampled_from([each for each in self.live() if not each.ended]))
        for value in values:
            call, base = self._some_call(data, session)
            self._answered(session, call, base, self._ask(session, call))
            call, base = self._some_call(data, session)
            self._answered(session, call, base, self._ask(session, call))
            turn = session.trajectories[-1].turns[0]
            body = {"reward": value, "interaction_id": turn.name}
            assert session.rollout.post("/rl/set_reward", body).status == session.reward(turn, value)
        self._check(session)

    @rule(data=st.data())
    @precondition(lambda self: any(each.turns() for each in self.live() if not each.ended))
    def repeat(self, data: st.DataObject) -> None:
        """An SDK tries again what was answered."""
        session = data.draw(st.sampled_from([each for each in self.live() if each.turns() and not each.ended]))
        self.retry(session, data.draw(st.sampled_from(session.turns()), "turn"))

    def retry(self, session: Session, turn: Turn) -> None:
        """The same answer, and no new sample; without a key only while the trajectory is open."""
        recorded, sampled = session.repeated(turn.call), len(self.fleet.witness.calls())
        reply = self._ask(session, turn.call, **RETRY)
        if recorded is None:
            self._answered(session, turn.call, turn.base, reply)
            return
        assert reply == recorded
        assert len(self.fleet.witness.calls()) == sampled
        self._check(session)

    @rule(data=st.data())
    @precondition(lambda self: any(each.turns() for each in self.live() if not each.ended))
    def sample_again(self, data: st.DataObject) -> None:
        """The same body once more, on purpose: another sample."""
        session = data.draw(st.sampled_from([each for each in self.live() if each.turns() and not each.ended]))
        turn = data.draw(st.sampled_from(session.turns()), "turn")
        call = Call(turn.call.path, turn.call.body)
        self._answered(session, call, turn.base, self._ask(session, call))

    @rule(data=st.data())
    @precondition(lambda self: any(turn.call.key for each in self.live() if not each.ended for turn in each.turns()))
    def reuse_key(self, data: st.DataObject) -> None:
        """A key with another body is refused."""
        session, turn = data.draw(
            st.sampled_from(
                [(each, turn) for each in self.live() if not each.ended for turn in each.turns() if turn.call.key]
            )
        )
        other = Call(turn.call.path, {**turn.call.body, "seed": next(_serials)}, turn.call.key)
        assert self._ask(session, other) == Failed(422, "idempotency_key_reused")
        self._check(session)

    @rule(data=st.data(), value=REWARDS, named=st.booleans())
    @precondition(lambda self: self.live())
    def reward(self, data: st.DataObject, value: float, named: bool) -> None:
        session = self._pick(data)
        turns = session.turns()
        body: dict[str, Any] = {"reward": value}
        if not turns:
            assert session.rollout.post("/rl/set_reward", body).status == 400
            return
        turn = data.draw(st.sampled_from(turns), "turn") if named else turns[-1]
        if named:
            body["interaction_id"] = turn.name
        wanted = session.reward(turn, value)
        for _ in range(2):  # the second one is a retry
            answer = session.rollout.post("/rl/set_reward", body)
            assert answer.status == wanted, answer.body
        if wanted == 200:
            trajectory = session.holder(turn)
            assert answer.json()["trajectory_ready"] == trajectory.ready
            assert answer.json()["interaction_count"] == len(trajectory.turns)
        self._check(session)

    @rule(data=st.data())
    @precondition(lambda self: self.live())
    def end(self, data: st.DataObject) -> None:
        session = self._pick(data)
        session.end()
        result = session.rollout.post("/rl/end_session", {})
        assert (result.status, result.json()["ready_trajectory_ids"]) == (200, session.ready())
        self._check(session)

    @rule(data=st.data(), remove=st.booleans(), style=st.sampled_from(["individual", "concat"]))
    @precondition(lambda self: self.live())
    def export(self, data: st.DataObject, remove: bool, style: str) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.live()), min_size=1, unique_by=lambda each: each.name))
        discount = data.draw(st.sampled_from([1.0, 0.5, 0.0]), "discount")
        self._export(chosen, remove=remove, style=style, discount=discount)

    def _export(self, chosen: list[Session], *, remove: bool, style: str, discount: float) -> None:
        request = {
            "session_ids": [each.name for each in chosen],
            "remove_session": remove,
            "style": style,
            "discount": discount,
        }
        if self._kept(request):
            return  # that is the rule ``export_again``
        answer = self.fleet.admin("POST", "/export_trajectories", request)
        if unready := [each for each in chosen if not each.exportable()]:
            assert answer.status in {404 if each.ended else 425 for each in unready}, answer.body
            return
        assert answer.status == 200, answer.body
        name = answer.json()["export_id"]
        took = [(session, number) for session in chosen for number in session.take(name, remove=remove)]
        export = Export(request, answer.json(), took)
        check_rows(export, self.fleet.witness)
        assert self.fleet.admin("POST", "/export_trajectories", request).json() == export.answer
        self.exports.append(export)
        for session in chosen:
            self._check(session)

    def _kept(self, request: dict[str, Any]) -> bool:
        """Whether the answer to the same request is still kept."""
        return any(requests_of(kept.request) & requests_of(request) for kept in self.exports)

    @rule(data=st.data())
    @precondition(lambda self: self.exports)
    def export_again(self, data: st.DataObject) -> None:
        kept = data.draw(st.sampled_from(self.exports))
        if any((session, number) not in kept.took for session, _ in kept.took for number in session.exportable()):
            return  # there is more by now: the request is a new one
        answer = self.fleet.admin("POST", "/export_trajectories", kept.request)
        if all(session.trajectories[number].held for session, number in kept.took):
            assert answer.json() == kept.answer
        else:  # a newer export took it over, and was acknowledged
            assert (answer.status, answer.json()["error"]["code"]) == (404, "export_not_found")

    @rule(data=st.data())
    @precondition(lambda self: self.exports)
    def acknowledge(self, data: st.DataObject) -> None:
        self._acknowledge(data.draw(st.sampled_from(self.exports)))

    def _acknowledge(self, kept: Export) -> None:
        body = {"export_id": kept.answer["export_id"]}
        assert self.fleet.admin("POST", "/export_trajectories/ack", body).json()["released"]
        self.exports.remove(kept)
        for session, number in kept.took:
            trajectory = session.trajectories[number]
            trajectory.held = trajectory.held and trajectory.taken != kept.answer["export_id"]
        for session, _ in kept.took:
            self._check(session)

    @rule(data=st.data())
    @precondition(lambda self: any(not each.ended for each in self.live()))
    def leave_in_a_stream(self, data: st.DataObject) -> None:
        """A caller that goes away leaves no interaction."""
        session = data.draw(st.sampled_from([each for each in self.live() if not each.ended]))
        self._script(hold_after=2)
        body = {"messages": [{"role": "user", "content": "x"}], **self._sampling()}  # an answer that is whole is kept
        stream = Stream(self.fleet.front.port, CHAT, body, session.rollout.key)
        next(stream.events())
        stream.close()
        wait_until(lambda: not any(map(self._in_flight, self.fleet.proxies)), what="the data proxy learns of it")
        self._release()
        self._check(session)

    @rule(data=st.data())
    @precondition(lambda self: any(not each.ended for each in self.live()))
    def retry_in_flight(self, data: st.DataObject) -> None:
        """Two tries of one call at the same time are one sample."""
        session = data.draw(st.sampled_from([each for each in self.live() if not each.ended]))
        call, base = self._some_call(data, session, keyed=True)
        self._script(hold_after=1)
        first = later(self._ask, session, call)
        self._reached(1)
        second = later(self._ask, session, call, **RETRY)
        self._release()
        reply = first.result()
        assert reply == second.result()
        self._answered(session, call, base, reply)

    # -- what operators do

    @rule(version=VERSIONS, load=st.booleans())
    def swap_weights(self, version: int, load: bool) -> None:
        self._swap(version, load)

    def _swap(self, version: int, load: bool) -> None:
        if load or self.fleet.weights:
            self.fleet.load(version)
        else:
            self._control("/set_version", {"version": version, "force": True})

    @rule(data=st.data(), version=VERSIONS)
    @precondition(lambda self: any(not each.ended for each in self.live()))
    def swap_weights_in_a_call(self, data: st.DataObject, version: int) -> None:
        """Paused in the middle of an answer, and on with other weights."""
        session = data.draw(st.sampled_from([each for each in self.live() if not each.ended]))
        call, base = self._some_call(data, session)
        self._script(hold_after=2)
        running = later(self._ask, session, call)
        self._reached(2)
        self._control("/pause_generation", {})
        self._release()
        self._swap(version, load=True)
        self._control("/continue_generation", {})
        self._answered(session, call, base, running.result())

    # -- what happens to processes

    @rule(data=st.data())
    @precondition(lambda self: self.kills_left and self.live())
    def kill(self, data: st.DataObject) -> None:
        """Between calls."""
        member = self._victim(data)
        member.kill()
        self._heal(member)

    @rule(data=st.data(), tokens=st.sampled_from([0, 2]))
    @precondition(lambda self: self.kills_left and any(not each.ended for each in self.live()))
    def kill_in_a_call(self, data: st.DataObject, tokens: int) -> None:
        """Before the answer's first byte, or in the middle. Its caller tries again until it is answered: once."""
        session = data.draw(st.sampled_from([each for each in self.live() if not each.ended]))
        call, base = self._some_call(data, session, keyed=True)
        member = self._victim(data)
        self._script(hold_after=tokens)
        running = later(self._ask, session, call)
        self._reached(tokens)
        member.kill()
        self._release()
        self._heal(member, session)
        first = running.result()
        again = self._until_answered(session, call)
        assert first in (again,) or isinstance(first, Failed)
        self._answered(session, call, base, again)

    @rule(data=st.data(), value=REWARDS)
    @precondition(lambda self: self.kills_left and any(each.turns() for each in self.live()))
    def kill_in_a_reward(self, data: st.DataObject, value: float) -> None:
        session = data.draw(st.sampled_from([each for each in self.live() if each.turns()]))
        turn = data.draw(st.sampled_from(session.turns()), "turn")
        body = {"reward": value, "interaction_id": turn.name}
        wanted = session.reward(turn, value)
        member = self._victim(data)
        running = later(session.rollout.post, "/rl/set_reward", body)
        member.kill()
        self._heal(member, session)
        running.exception()
        assert session.rollout.post("/rl/set_reward", body).status == wanted
        self._check(session)

    @rule(data=st.data(), remove=st.booleans())
    @precondition(lambda self: self.kills_left and any(each.exportable() for each in self.live()))
    def kill_in_an_export(self, data: st.DataObject, remove: bool) -> None:
        session = data.draw(st.sampled_from([each for each in self.live() if each.exportable()]))
        request = {"session_ids": [session.name], "remove_session": remove, "style": "concat", "discount": 0.5}
        if self._kept(request):
            return
        member = self._victim(data)
        running = later(self.fleet.admin, "POST", "/export_trajectories", request)
        member.kill()
        self._heal(member, session)
        running.exception()
        self._export([session], remove=remove, style="concat", discount=0.5)

    def _victim(self, data: st.DataObject) -> Member:
        self.kills_left -= 1
        names = [member.name for member in self.fleet.members]
        name = data.draw(st.sampled_from(names), "victim")
        return next(member for member in self.fleet.members if member.name == name)

    def _heal(self, member: Member, unknown: Session | None = None) -> None:
        """``unknown``: whether the change that was going on reached it, only a repetition tells."""
        member.restart()
        for session in self.sessions:
            session.rollout.front = self.fleet.front
        self.fleet.heal(member)
        for session in self.sessions:
            if session is not unknown:
                self._check(session)

    def _until_answered(self, session: Session, call: Call) -> Reply:
        def answered() -> Reply | None:
            reply = self._ask(session, call, **RETRY)
            return reply if isinstance(reply, Reply) else None

        reply: Reply = wait_until(answered, what="the call is answered")
        return reply

    def _script(self, **what: Any) -> None:
        for engine in self.fleet.engines:
            assert engine.call("POST", "/script", what).status == 200

    def _release(self) -> None:
        for engine in self.fleet.engines:
            if engine.process.popen.poll() is None:
                engine.call("POST", "/release")

    def _reached(self, tokens: int) -> None:
        wait_until(
            lambda: any(self._progress(engine, tokens) for engine in self.fleet.engines), what="the engine works"
        )

    def _progress(self, engine: Member, tokens: int) -> bool:
        return bool(engine.call("GET", "/progress").json()["most"] >= tokens)

    def _in_flight(self, proxy: Member) -> int:
        return int(proxy.call("GET", "/health").json()["in_flight"])

    def _control(self, path: str, body: dict[str, Any]) -> None:
        for proxy in self.fleet.proxies:
            assert proxy.call("POST", path, body, key=self.fleet.key).status == 200

    def teardown(self) -> None:
        """Whatever is left is ended and exported; then it is gone."""
        for session in self.live():
            if not session.ended:
                session.end()
                assert session.rollout.post("/rl/end_session", {}).status == 200
            if session.exportable():
                self._export([session], remove=True, style="individual", discount=0.5)
        for kept in tuple(self.exports):
            self._acknowledge(kept)


def machine_of(fleet: Fleet, kills: int) -> type[DataPlaneMachine]:
    return type("BoundMachine", (DataPlaneMachine,), {"fleet": fleet, "kills": kills})
