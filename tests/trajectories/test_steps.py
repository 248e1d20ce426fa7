"""Steps of a job by their files: hostile text, damaged lines, and no more than one file read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import ArealError, NotFound
from areal.rollout.dump import write_step
from areal.trajectories.record import Episode, Interaction
from areal.trajectories.steps import question_of, read_failures, read_sample, read_step, step_files
from areal.trajectories.view import TokenDecoder, shown_episode, turns

HOSTILE = "</script><script>alert(1)</script>\x1b[2J\x07\u202e\ud800<img src=x onerror=alert(2)>"
decoder = TokenDecoder(lambda ids: "".join(chr(97 + each % 26) for each in ids), "letters")


def sample(group: str, number: int, reward: float | None, **more: Any) -> Episode:
    row = Interaction(
        interaction_id=f"{group}/{number}/0",
        model="m",
        rewarded=reward is not None,
        reward=reward or 0.0,
        original_reward=reward or 0.0,
        advantage=0.5,
        input_ids=(1, 2, 3, 4),
        loss_mask=(0, 0, 1, 1),
        logprobs=(0.0, 0.0, -0.5, -1.5),
        versions=(-1, -1, 3, 4),
        turn_ids=(-1, -1, 0, 0),
    )
    return Episode(f"{group}/{number}", (row,), 7, number, reward, group=group, step=1, **more)


def test_step_files_are_ordered_with_evaluation_after_step(tmp_path: Path) -> None:
    assert step_files(tmp_path / "none") == []
    for name in (
        "trajectories-000010.jsonl",
        "trajectories-000002.jsonl",
        "trajectories-eval-000002.jsonl",
        "x",
        "trajectories-v1.jsonl",
        "trajectories-000003.part",
    ):
        (tmp_path / name).touch()
    assert [(each.step, each.is_eval) for each in step_files(tmp_path)] == [(2, False), (2, True), (10, False)]


def test_step_summary_has_groups_with_spread(tmp_path: Path) -> None:
    question = {"messages": [{"role": "user", "content": "1234"}], "answer": "4321"}
    alike = [sample("g-1", number, 1.0, example=question) for number in (0, 1)]
    apart = [sample("g-2", number, float(number)) for number in (0, 1)]
    write_step(tmp_path, 1, [*alike, *apart, sample("g-3", 0, None)])
    step = read_step(tmp_path / "trajectories-000001.jsonl", decoder)
    one, two, three = step.groups
    assert one.is_without_spread and one.mean == 1.0 and one.spread == 0.0
    assert not two.is_without_spread and two.mean == 0.5 and two.spread == 0.5
    assert not three.is_without_spread and three.mean is None and three.spread is None
    first = one.samples[0]
    assert (first.question, first.hint, first.tokens, first.turns, first.versions) == ("1234", "de", 2, 1, (3, 4))
    assert first.mean_logprob == -1.0 and first.advantage == 0.5
    second = one.samples[1]
    assert read_sample(tmp_path / "trajectories-000001.jsonl", second.line).episode == "g-1/1"
    assert read_step(tmp_path / "trajectories-000001.jsonl").groups[0].samples[0].hint == "3 4"


def test_rows_without_turn_ids_count_as_one_turn_each(tmp_path: Path) -> None:
    several = sample("g", 0, 1.0)
    (row,) = several.interactions
    rows = (replace(row, turn_ids=(-1, -1, 0, 1)), replace(row, turn_ids=(-1, -1, -1, -1)))
    write_step(tmp_path, 1, [replace(several, interactions=rows)])

    (group,) = read_step(tmp_path / "trajectories-000001.jsonl").groups

    assert group.samples[0].turns == 3


def test_summary_is_of_all_rows_and_generated_tokens(tmp_path: Path) -> None:
    whole = sample("g", 3, 0.25, seconds=1.5, failures=({"code": "timeout", "count": 2}, {"code": "tool", "count": 1}))
    (row,) = whole.interactions
    more = replace(row, advantage=1.5, versions=(-1, 7, 4, 0), logprobs=(-9.0, -9.0, -1.0, -1.0), truncated=True)
    rows = (row, more, replace(row, advantage=None, loss_mask=(0, 0, 0, 1)))
    write_step(tmp_path, 1, [replace(whole, interactions=rows), replace(whole, interactions=())])
    one, none = read_step(tmp_path / "trajectories-000001.jsonl").groups[0].samples
    assert (one.prompt, one.sample, one.reward, one.seconds, one.truncated) == (7, 3, 0.25, 1.5, True)
    assert (one.advantage, one.tokens, one.turns, one.versions) == (1.0, 5, 3, (0, 3, 4, 7))
    assert one.mean_logprob == pytest.approx((-0.5 - 1.5 - 1.0 - 1.0 - 1.5) / 5)
    assert one.failures == ("timeout ×2", "tool ×1")
    assert (none.advantage, none.tokens, none.turns, none.truncated, none.hint) == (None, 0, 0, False, "")
    assert none.mean_logprob is None


@pytest.mark.parametrize(
    ("example", "question"),
    [
        ({"messages": [{"content": "be brief"}, {"content": "1+1"}], "question": "no"}, "1+1"),
        ({"messages": [{"content": [{"type": "image"}]}], "problem": "which?"}, "which?"),
        ({"messages": [], "answer": "4", "level": 3, "question": "2+2"}, "2+2"),
        ({"answer": "4"}, ""),
        ({"question": "x" * 201}, "x" * 200),
        ({"messages": [{"content": "x" * 201}]}, "x" * 200),
    ],
)
def test_question_is_the_last_message_or_the_first_text(example: dict[str, Any], question: str) -> None:
    assert question_of(sample("g", 0, 1.0, example=example)) == question


def test_first_twenty_damaged_lines_are_quoted(tmp_path: Path) -> None:
    path = tmp_path / "trajectories-000001.jsonl"
    path.write_text("\n" + '{"episode": "' * 300 + "\n" * 2 + "{\n" * 24)
    step = read_step(path)
    assert (len(step.damaged), step.damaged_lines, step.groups) == (20, 25, ())
    assert step.damaged[1].startswith(f"{path}:4: ") and all(len(each) <= 500 for each in step.damaged)


def test_damaged_lines_are_named_and_the_others_read(tmp_path: Path) -> None:
    path = tmp_path / "trajectories-000001.jsonl"
    write_step(tmp_path, 1, [sample("g-1", number, 1.0) for number in (0, 1)])
    whole = path.read_bytes().splitlines()
    wrong = json.loads(whole[0])
    wrong["interactions"][0]["logprobs"] = ["x"] * 4
    path.write_bytes(b"\n".join([whole[0], b"{", json.dumps(wrong).encode(), whole[1], b'{"episode": 1']))
    step = read_step(path)
    assert len(step.groups[0].samples) == 2 and step.damaged_lines == 3
    assert f"{path}:2: " in step.damaged[0] and "logprobs has a value that is not a number" in step.damaged[1]
    with pytest.raises(ArealError, match=r"no line of .* begins at byte 5"):
        read_sample(path, 5)
    with pytest.raises(NotFound):
        read_step(tmp_path / "trajectories-000002.jsonl")


def test_nan_and_hostile_text_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "trajectories-000001.jsonl"
    document = sample("g", 0, 1.0).document() | {
        "group": HOSTILE,
        "example": {"q": HOSTILE, "deep": [[1]]},
        "reward": float("nan"),
    }
    document["interactions"][0]["logprobs"][2] = None
    path.write_text(json.dumps(document) + "\n")
    (group,) = read_step(path, decoder).groups
    assert group.name == HOSTILE and group.samples[0].question == HOSTILE and group.samples[0].mean_logprob is None
    shown = shown_episode(read_sample(path, 0), decoder)
    assert shown["reward"] is None and shown["turns"][0]["lp"] == [None, -1.5]
    json.dumps(shown, allow_nan=False)


def test_megabyte_token_has_short_hint(tmp_path: Path) -> None:
    long = TokenDecoder(lambda ids: "x" * (1 << 20) * len(ids), "long")
    write_step(tmp_path, 1, [sample("g", 0, 1.0)])
    (group,) = read_step(tmp_path / "trajectories-000001.jsonl", long).groups
    assert len(group.samples[0].hint) == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted(
    {*sample("g", 0, 1.0).document(), *sample("g", 0, 1.0).document()["interactions"][0], "messages", "response"}
)


@given(st.lists(st.tuples(st.sampled_from(FIELDS), st.booleans(), JSON), min_size=1, max_size=4))
def test_any_field_value_is_sample_or_damaged_line(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, bool, Any]]
) -> None:
    document = sample("g", 0, 1.0).document()
    for name, inside, value in changes:
        target = document["interactions"][0] if inside and isinstance(document["interactions"], list) else document
        target[name] = value
        if (
            not isinstance(document["interactions"], list)
            or not document["interactions"]
            or not isinstance(document["interactions"][0], dict)
        ):
            break
    path = tmp_path_factory.mktemp("steps") / "trajectories-000001.jsonl"
    path.write_text(json.dumps(document) + "\n")
    step = read_step(path, decoder)
    if step.groups:
        json.dumps(shown_episode(read_sample(path, 0), decoder), allow_nan=False)
    assert bool(step.groups) != bool(step.damaged_lines)


def test_conversation_with_repeated_ids_terminates(tmp_path: Path) -> None:
    row = sample("g", 0, 1.0).document()
    first = row["interactions"][0] | {"interaction_id": "a", "parent_id": None}
    row["interactions"] = [first, first | {"parent_id": "a"}]
    path = tmp_path / "trajectories-000001.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert len(shown_episode(read_sample(path, 0), None)["turns"]) == 2


def test_failures_are_between_two_times_newest_first(tmp_path: Path) -> None:
    assert read_failures(tmp_path) == ([], False)
    lines = [
        {"at": float(at), "episode": f"e-{at}", "prompt": at, "blame": "user", "error": "x" * 300}
        for at in range(5_000)
    ]
    (tmp_path / "failures.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"at": 9, "epi')
    found, is_cut = read_failures(tmp_path, 4_990, 4_992)
    assert [each.at for each in found] == [4_992, 4_991] and not is_cut
    assert read_failures(tmp_path, 10, 20) == ([], True)
    assert read_failures(tmp_path)[1] and len(read_failures(tmp_path)[0]) < 5_000


@pytest.mark.parametrize(("size", "is_cut"), [(1 << 20, False), ((1 << 20) + 1, True)])
def test_last_mebibyte_of_failures_is_read(tmp_path: Path, size: int, is_cut: bool) -> None:
    line = json.dumps({"at": 1.0, "episode": "e", "prompt": 1, "blame": "user", "error": ""}) + "\n"
    rest = size - (size // len(line) - 1) * len(line)
    (tmp_path / "failures.jsonl").write_text(line[:-2].rjust(rest - 2) + "}\n" + line * (size // len(line) - 1))
    found, cut = read_failures(tmp_path)
    assert (len(found), cut) == (size // len(line) - is_cut, is_cut)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_non_finite_rewards_leave_group_readable(tmp_path: Path, reward: float) -> None:
    path = tmp_path / "trajectories-000001.jsonl"
    episodes = [sample("g", 0, reward), sample("g", 1, 1.0), sample("g", 2, -math.inf)]
    path.write_text("".join(json.dumps(each.document()) + "\n" for each in episodes))
    (group,) = read_step(path).groups
    assert group.mean is not None and math.isnan(group.mean) and group.spread is not None and math.isnan(group.spread)
    assert len(group.samples) == 3 and not group.is_without_spread


@pytest.mark.parametrize("calls", [["a"], 3, [{"function": 1}]])
def test_answer_with_invalid_tool_calls_is_damaged_line(tmp_path: Path, calls: Any) -> None:
    path = tmp_path / "trajectories-000001.jsonl"
    turn = Interaction("i", response={"role": "assistant", "content": "x", "tool_calls": calls})
    episodes = [Episode("e", (turn,), group="g"), sample("g", 1, 1.0)]
    path.write_text("".join(json.dumps(each.document()) + "\n" for each in episodes))
    step = read_step(path)
    assert [each.episode for each in step.groups[0].samples] == ["g/1"]
    assert step.damaged_lines == 1 and f"{path}:1" in step.damaged[0]


def test_turn_without_temperature_has_none() -> None:
    (row,) = sample("g", 0, 1.0).interactions
    episode = replace(sample("g", 0, 1.0), interactions=(replace(row, temperature=None),))
    assert [turn.temperatures for turn in turns(episode, None)] == [[]]
