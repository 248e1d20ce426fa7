"""A model is scaled to 0 while callers use it: running calls end as they would, later ones are 503 with a Retry-After,
which SDKs retry, and nothing that was acknowledged is lost."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.e2e.conftest import Box

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]
CALLERS = 6


def post(box: Box, path: str, body: dict[str, Any], key: str) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{box.url}{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


class Caller(threading.Thread):
    """Takes turns in a session until a call is refused."""

    def __init__(self, box: Box, started: dict[str, Any]) -> None:
        super().__init__(name=f"caller {started['session_id']}")
        self.box, self.session, self.key = box, started["session_id"], started["session_api_key"]
        self.answers = 0
        self.has_begun = threading.Event()
        self.refused: tuple[int, Any] = (0, None)

    def run(self) -> None:
        while not self.refused[0]:
            body = {"model": "reverse", "messages": [{"role": "user", "content": f"{self.answers}"}], "max_tokens": 4}
            status, answer = post(self.box, "/v1/chat/completions", body, self.key)
            if status == 200:
                self.answers += 1
                self.has_begun.set()
            else:
                self.refused = (status, answer)


def test_scale_to_zero_under_load_loses_nothing_acknowledged(box: Box) -> None:
    box.ok("apply", "-f", box.manifest(service="limits: {requestTimeoutSeconds: 15}"))
    status, group = post(box, "/rl/start_session", {"model": "reverse", "task_id": "t", "group_size": CALLERS}, box.key)
    assert status == 201, group
    callers = [Caller(box, each) for each in group["sessions"]]
    for caller in callers:
        caller.start()
    for caller in callers:
        assert caller.has_begun.wait(60)

    box.ok("scale", "model/reverse", "--replicas", "0")
    for caller in callers:
        caller.join(90)
        assert (caller.refused[0], caller.refused[1]["error"]["code"]) == (503, "model_has_no_replicas"), caller.refused

    assert not [name for name in box.processes() if name.startswith(("engine", "data-proxy"))]
    box.ok("scale", "model/reverse", "--replicas", "1")
    for caller in callers:
        assert post(box, "/rl/set_reward", {"reward": 1.0}, caller.key)[0] == 200
        found = json.loads(box.ok("inf", "sessions", "show", caller.session, "-o", "json").out)
        assert json.dumps(found).count('"finishReason"') >= caller.answers, (caller.answers, found)
