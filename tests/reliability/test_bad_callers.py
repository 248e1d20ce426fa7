"""Requests that are wrong in every way: 4xx in the API's shape, nothing recorded, and the next caller is served."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.asking import CHAT
from tests.reliability.faults import Outcome, fault
from tests.reliability.fleet import Fleet, running_fleet
from tests.reliability.raw import reported, request
from tests.reliability.scenes import SERVED, Scene, failure, scene_at

PART = "Invalid requests"
REWARD, START, EXPORT = "/rl/set_reward", "/rl/start_session", "/export_trajectories"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("bad"), tokenizer, behind_gateway=True) as fleet:
        yield fleet


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()


MESSAGES = [{"role": "user", "content": "Hello"}]
GOOD = _json({"messages": MESSAGES})


def sent(path: str, body: bytes, **headers: str | bytes) -> Callable[[Scene], bytes]:
    """With the session's key, unless another one is given."""

    def make(scene: Scene) -> bytes:
        auth = {"Authorization": f"Bearer {scene.rollout.key}", "Content-Type": "application/json"}
        return request(path, {**auth, **{name.replace("_", "-"): value for name, value in headers.items()}}, body)

    return make


def by_admin(path: str, body: Any) -> Callable[[Scene], bytes]:
    return lambda scene: request(path, {"Authorization": f"Bearer {scene.fleet.key}"}, _json(body))


def raw(*parts: bytes) -> Callable[[Scene], bytes]:
    return lambda scene: b"".join(parts)


WRONG: dict[str, Callable[[Scene], bytes]] = {
    "no key": sent(CHAT, GOOD, Authorization=""),
    "wrong key": sent(CHAT, GOOD, Authorization="Bearer unknown"),
    "key that is not ASCII": sent(CHAT, GOOD, Authorization="Bearer clé-日本".encode()),
    "key with a null byte": sent(CHAT, GOOD, Authorization=b"Bearer a\0b"),
    "session key on an admin route": sent(START, _json({"task_id": "t"})),
    "broken JSON": sent(CHAT, GOOD[:-3]),
    "JSON that is not an object": sent(CHAT, b"[1, 2]"),
    "JSON that is not UTF-8": sent(CHAT, GOOD.replace(b"Hello", b"\xff\xfe")),
    "lone surrogate": sent(CHAT, GOOD.replace(b"Hello", b"\\ud800")),
    "100,000 brackets": sent(CHAT, b"[" * 100_000),
    "100,000 nested objects in a field": sent(CHAT, b'{"messages": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001),
    "number of 10,000 digits": sent(CHAT, GOOD[:-1] + b', "n": ' + b"9" * 10_000 + b"}"),
    "no messages": sent(CHAT, _json({"messages": []})),
    "unknown model": sent(CHAT, _json({"messages": MESSAGES, "model": "absent"})),
    "`n` of 0": sent(CHAT, _json({"messages": MESSAGES, "n": 0})),
    "temperature `NaN`": sent(CHAT, GOOD[:-1] + b', "temperature": NaN}'),
    "prompt beyond the context": sent(CHAT, _json({"messages": [{"role": "user", "content": "Hello " * 200_000}]})),
    "body beyond the limit": sent(CHAT, b"", Content_Length=str(2**40)),
    "chunked body beyond the limit": lambda scene: (
        sent(CHAT, b"", Content_Length="", Transfer_Encoding="chunked")(scene) + b"4000000\r\n" + b" " * (2**26)
    ),
    "reward `NaN`": sent(REWARD, b'{"reward": NaN}'),
    "reward beyond float32": sent(REWARD, b'{"reward": 1e300}'),
    "reward of an unknown interaction": sent(REWARD, _json({"reward": 1.0, "interaction_id": "chatcmpl-0"})),
    "export of an unknown session": by_admin(EXPORT, {"session_ids": ["absent"]}),
    "export of a session that is not ready": lambda scene: by_admin(
        EXPORT, {"session_ids": [scene.rollout.session_id]}
    )(scene),
    "key of another session": lambda scene: by_admin(START, {"task_id": "t", "api_key": scene.rollout.key})(scene),
    "group of 2,000": by_admin(START, {"task_id": "t", "group_size": 2000}),
    "headers of 1 MB": sent(CHAT, GOOD, x_large="a" * 2**20),
    "10,000 headers": lambda scene: request(CHAT, {f"x-{number}": "a" for number in range(10_000)}, GOOD),
    "two content lengths": raw(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 40\r\n\r\n{}"
    ),
    "content length and chunked encoding": raw(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    "negative content length": sent(CHAT, GOOD, Content_Length="-5"),
    "invalid chunk size": lambda scene: (
        sent(CHAT, b"", Content_Length="", Transfer_Encoding="chunked")(scene) + b"zzz\r\n"
    ),
    "another protocol": raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20),
    "path outside the tree": sent("/v1/../../etc/passwd", GOOD),
    "invalid method": raw(b"BREW /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n\r\n"),
}


@pytest.mark.parametrize(
    "make", [pytest.param(make, id=name, marks=fault(PART, name, "in a request")) for name, make in WRONG.items()]
)
def test_wrong_request_is_refused_and_leaves_nothing(
    fleet: Fleet, outcome: Outcome, make: Callable[[Scene], bytes]
) -> None:
    scene = scene_at(fleet)
    answer = reported(fleet.front, make(scene))
    assert answer.startswith(("4", "connection")), answer
    outcome.callers(answer)
    outcome.recorded(scene.kept())
    assert failure(scene.ask()) == "answered"
    outcome.healed(SERVED)
    assert scene.exported()


@fault(PART, "duplicate field", "in a request")
def test_duplicate_field_takes_last_value(fleet: Fleet, outcome: Outcome) -> None:
    """As every JSON reader does: the last one counts, for the relay and for the data proxy alike."""
    scene = scene_at(fleet)
    body = b'{"model": "absent", "n": 3, "messages": %s, "n": 2, "model": "tiny", "return_token_ids": true}'
    answer = reported(fleet.front, sent(CHAT, body % _json(MESSAGES))(scene))
    outcome.callers(answer)
    outcome.recorded(f"{len(scene.recorded()) - 1} choices: the last one counts")
    outcome.healed(SERVED)
