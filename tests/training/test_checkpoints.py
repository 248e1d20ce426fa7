from pathlib import Path

import pytest

from areal.errors import ArealError
from areal.training.checkpoints import Checkpoints
from areal.training.ranks import one_process


def _save(checkpoints: Checkpoints, step: int, text: str = "weights") -> None:
    with checkpoints.writing(step, one_process("cpu")) as (folder, state):
        (folder / "shard").write_text(text)
        state["step"] = step


def test_failed_write_keeps_previous_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    _save(checkpoints, 1)
    with pytest.raises(RuntimeError), checkpoints.writing(2, one_process("cpu")) as (folder, _):
        (folder / "shard").write_text("half")
        raise RuntimeError("killed")
    assert not list(checkpoints.root.glob("*.tmp"))
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.state()["step"] == 1
    _save(checkpoints, 2)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [1, 2]
    assert not list(checkpoints.root.glob("*.tmp"))


def test_rewriting_a_step_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 4, "old")
    _save(checkpoints, 4, "new")
    newest = checkpoints.newest()
    assert newest is not None
    assert (newest.folder / "shard").read_text() == "new"


def test_newest_two_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (5, 10, 15, 20):
        _save(checkpoints, step)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [15, 20]


def test_torn_state_error_names_file(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 1)
    (tmp_path / "step_1" / "state.json").write_text("{")
    newest = checkpoints.newest()
    assert newest is not None
    with pytest.raises(ArealError, match=r"step_1/state\.json cannot be read"):
        newest.state()


def test_newest_of_empty_folder_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none").newest() is None


@pytest.mark.parametrize(
    ("name", "place"), [("actor/__0_0.distcp", 0), ("actor/__0_0.distcp", 70_000_000), ("actor/.metadata", 3)]
)
def test_flipped_bit_is_damage_and_previous_checkpoint_is_used(tmp_path: Path, name: str, place: int) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        with checkpoints.writing(step, one_process("cpu")) as (folder, _):
            (folder / "actor").mkdir()
            (folder / "actor" / "__0_0.distcp").write_bytes(bytes(80_000_000))  # more than a part
            (folder / "actor" / ".metadata").write_bytes(b"where it is")
            (folder / "actor" / "empty").touch()
    assert [checkpoint.damage() for checkpoint in checkpoints.all()] == [None, None]
    with (tmp_path / "step_2" / name).open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 4]))
    assert checkpoints.all()[1].damage() == f"{tmp_path}/step_2/{name} has other bytes than were written"
    whole = checkpoints.newest_whole()
    assert whole is not None and whole.step == 1


def test_changed_digit_in_state_is_damage(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 12)
    path = tmp_path / "step_12" / "state.json"
    path.write_text(path.read_text().replace('"step": 12', '"step": 13'))
    (found,) = checkpoints.all()
    assert "its checksum is another one" in str(found.damage())
