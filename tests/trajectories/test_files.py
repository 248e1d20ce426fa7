"""What is written is what is read, in each kind of file."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import ArealError, NotFound
from areal.trajectories.reading import read_episodes, read_parquet, write_parquet
from areal.trajectories.record import Episode, episodes_of_export, read_episode, rows_of_export
from tests.trajectories.samples import branched, external, interaction

EXPORT = {
    "traj": {
        "input_ids": [[1, 2, 3, 4], [5, 6, 0, 0]],
        "loss_mask": [[0, 0, 1, 1], [0, 1, 0, 0]],
        "logprobs": [[0, 0, -0.5, -1.0], [0, -2.0, 0, 0]],
        "versions": [[-1, -1, 2, 3], [-1, 3, -1, -1]],
        "turn_ids": [[-1, -1, 0, 0], [-1, 0, -1, -1]],
        "attention_mask": [[True] * 4, [True, True, False, False]],
        "rewards": [0.5, 1.0],
        "original_rewards": [0.0, 1.0],
    },
    "rows": [
        {"session_id": "s", "trajectory_id": 0, "interaction_id": "a", "parent_id": None, "finish_reason": "stop"},
        {"session_id": "s", "trajectory_id": 1, "interaction_id": "b", "rewarded": True, "model": "m", "turns": []},
    ],
    "failures": [{"session_id": "s", "trajectory_id": 1, "code": "engine_failed", "count": 2}],
    "export_id": "exp-1",
}


def documents(episodes: Any) -> list[dict[str, Any]]:
    return [each.document() for each in episodes]


def test_export_is_read_unpadded_one_episode_per_trajectory() -> None:
    first, second = episodes_of_export(EXPORT)
    assert (first.episode, second.episode) == ("s/0", "s/1")
    assert second.interactions[0].input_ids == [5, 6]
    assert second.interactions[0].versions == [-1, 3]
    assert (first.reward, second.reward) == (None, 1.0)
    assert second.failures[0]["code"] == "engine_failed" and first.failures == ()


@pytest.mark.parametrize(
    "broken",
    [{}, {"traj": {}, "rows": [{}]}, {"traj": None, "rows": []}, {"traj": {"interactions": [{}]}, "rows": [{}]}],
)
def test_invalid_export_is_a_value_error(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no export"):
        rows_of_export(broken)


tokens = st.lists(st.integers(0, 2**31), max_size=5)


@given(
    st.lists(
        st.builds(interaction, st.text(min_size=1), tokens, tokens, reward=st.none() | st.floats(-1, 1)), max_size=3
    )
)
def test_episode_document_round_trips(rows: list[Any]) -> None:
    made = Episode("é\n<x>", tuple(rows), 3, 1, example={"k": [1, {"z": None}]})
    assert documents([read_episode(json.loads(json.dumps(made.document())))]) == documents([made])


@given(st.floats(-1e9, 0, width=32))
def test_document_logprob_keeps_float32_in_fewer_digits(value: float) -> None:
    (row,) = Episode("e", (interaction("a", [], [1], logprob=value),)).document()["interactions"]
    (written,) = row["logprobs"]
    assert np.float32(written) == np.float32(value)
    assert len(json.dumps(written)) <= 16


def test_parquet_round_trips(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "t.parquet"
    made = [branched(), branched("0-1", None), external()]
    assert write_parquet(iter(made), path) == 9
    assert documents(read_parquet(path)) == documents(made)


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in documents([branched(), external()])))


def write_npz(path: Path) -> None:
    packed = io.BytesIO()
    np.savez(packed, **{name: np.array(values) for name, values in EXPORT["traj"].items()})  # type: ignore[attr-defined,arg-type]
    path.write_bytes(packed.getvalue())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("about.json", json.dumps({name: EXPORT[name] for name in ("rows", "failures", "export_id")}))


@pytest.mark.parametrize(
    ("name", "write", "episodes"),
    [
        ("t.jsonl", write_jsonl, ["0-0", "1-0"]),
        ("t.json", lambda path: path.write_text(json.dumps(EXPORT)), ["s/0", "s/1"]),
        ("t.json", lambda path: path.write_text(json.dumps({"items": [EXPORT, EXPORT]})), ["s/0", "s/1"] * 2),
        ("t.json", lambda path: path.write_text(json.dumps(documents([branched()]))), ["0-0"]),
        ("t.npz", write_npz, ["s/0", "s/1"]),
    ],
)
def test_file_kind_is_detected_by_name_and_content(
    tmp_path: Path, name: str, write: Callable[[Path], Any], episodes: list[str]
) -> None:
    write(tmp_path / name)
    assert [each.episode for each in read_episodes(tmp_path / name)] == episodes


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", b'{"episode": "0", "interactions": []}\n{"episode"', "t.jsonl:2"),
        (
            "t.jsonl",
            b'{"episode": "0", "interactions": [{"interaction_id": "a", "input_ids": [1]}]}\n',
            "differ in length",
        ),
        ("t.json", b"{", "holds no trajectories"),
        ("t.json", b"3", "holds no trajectories"),
        ("t.json", b'{"items": 5}', "holds no trajectories"),
        ("t.json", b'{"items": [[1]]}', "holds no trajectories"),
        ("t.npz", b"PK", "holds no export"),
        ("t.parquet", b"PAR1", "holds no trajectories"),
    ],
)
def test_error_names_broken_file(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ArealError, match=message):
        list(read_episodes(path))


def test_missing_file_and_empty_folder_are_not_found(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing.jsonl"):
        with pytest.raises(NotFound):
            list(read_episodes(path))


def test_mixed_export_is_read() -> None:
    columns = {"input_ids": [[1, 2]], "loss_mask": [[0, 1]], "logprobs": [[0.0, -0.5]], "versions": [[-1, 3]]}
    columns |= {"turn_ids": [[-1, 0]], "attention_mask": [[True, True]], "rewards": [1.0], "original_rewards": [1.0]}
    text = {"messages": [], "response": {"role": "assistant", "content": "b"}, "reward": 0.5, "original_reward": 0.5}
    rows = [{"interaction_id": "a", "kind": "tokens"}, {"interaction_id": "b", "kind": "text"}]
    tokens, message = rows_of_export({"traj": {**columns, "interactions": [text]}, "rows": rows})
    assert (tokens.interaction_id, list(tokens.input_ids), tokens.reward) == ("a", [1, 2], 1.0)
    assert (message.interaction_id, message.response, message.reward) == ("b", text["response"], 0.5)
