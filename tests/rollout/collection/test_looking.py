"""``areal inf sessions`` and ``inf trajectories``: sessions and what they recorded, looked at without taking it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Areal
from tests.rollout.collection.conftest import Bench, Collecting
from tests.services.inference.recorder.rollouts import Rollout, begin
from tests.services.processes import script


@pytest.fixture
def rollout(bench: Bench) -> Rollout:
    """Two turns, the second rewarded: ready, and not leased yet."""
    made = begin(bench.proxy, bench.key, online=False, task_id="looking/1")
    made.chat("a")
    made.chat("b")
    made.reward(0.5)
    return made


def test_sessions_are_listed_with_turns_rewards_and_state(bench: Bench, rollout: Rollout, areal: Areal) -> None:
    result = areal("inf", "sessions", "list", "--task", "looking/", "--ready", "-o", "json", "--limit", "1000")
    (mine,) = [each for each in result.json["items"] if each["sessionId"] == rollout.session_id]
    assert (mine["state"], mine["interactionCount"], mine["reward"], mine["ready"]) == ("active", 2, 0.5, 1)
    table = areal("inf", "sessions", "list", "--group", rollout.group_id).rows
    assert table[0] == ["SESSION", "TASK", "STATE", "TURNS", "REWARD", "READY", "AGE"]
    assert [row[:5] for row in table[1:]] == [[rollout.session_id, "looking/1", "active", "2", "0.5"]]
    assert areal("inf", "sessions", "list", "--group", rollout.group_id, "--state", "ended").out == ""


def test_sessions_beyond_limit_are_reported(bench: Bench, areal: Areal) -> None:
    for _ in range(3):
        begin(bench.proxy, bench.key, task_id="many")
    result = areal("inf", "sessions", "list", "--task", "many", "--limit", "2", "-o", "name")
    assert len(result.out.splitlines()) == 2
    assert "there are more than 2" in result.err


def test_one_session_is_shown_with_its_interactions(bench: Bench, rollout: Rollout, areal: Areal) -> None:
    result = areal("inf", "sessions", "show", rollout.session_id)
    assert "trajectory 0: ready" in result.out
    assert [line.split()[5] for line in result.out.splitlines() if line.startswith("chatcmpl-")] == ["-", "0.5"]
    document = areal("inf", "sessions", "show", rollout.session_id, "-o", "json").json
    assert [each["reward"] for each in document["trajectories"][0]["interactions"]] == [None, 0.5]


def test_viewing_session_trajectory_leaves_it_for_trainer(
    bench: Bench, rollout: Rollout, areal: Areal, tokenizer: Path
) -> None:
    result = areal("inf", "trajectories", "show", rollout.session_id, "--tokenizer", str(tokenizer))
    assert result.code == 0, result.err
    assert result.out.count("answer:\n    Hello there, friend!<|im_end|>") == 2
    assert "[2]" in result.out and "tokens as above" in result.out
    assert "\x1b" not in result.out
    assert rollout.export()["traj"]["rewards"] == [0.5, 0.5]


def test_collected_folder_is_shown_best_first_and_as_page(bench: Bench, collecting: Collecting, tmp_path: Path) -> None:
    script(bench.engine, text="it is 2")
    data = collecting.data(*({"prompt": "x", "answer": each} for each in (1, 2, 3)))
    assert collecting(data, "--reward", "number").code == 0
    folder = str(collecting.output)
    shown = collecting.areal("inf", "trajectories", "show", folder, "--sort", "best", "--limit", "1", "-o", "json")
    assert [each["episode"] for each in shown.json["items"]] == ["1-0"]
    assert "first 1" in shown.err and "--tokenizer names it" in shown.err
    named = collecting.areal("inf", "trajectories", "show", folder, "--episode", "2-0", "-o", "name")
    assert named.out == "2-0\n"
    page = tmp_path / "page.html"
    assert collecting.areal("inf", "trajectories", "show", folder, "--html", str(page)).code == 0
    text = page.read_text(encoding="utf-8")
    data_element = text.split('id="data">')[1].split("</script>")[0]
    assert len(json.loads(data_element)["episodes"]) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sessions", "show", "absent-x-1"), "has no session"),
        (("trajectories", "show", "absent-x-1"), "has no session"),
        (("trajectories", "show", "./nothing.jsonl"), "there is no file"),
    ],
)
def test_missing_object_is_not_found(bench: Bench, areal: Areal, words: tuple[str, ...], message: str) -> None:
    result = areal("inf", *words)
    assert result.code == 4
    assert message in result.err
