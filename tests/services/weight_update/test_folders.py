"""Folders of weights: what a worker computes with is not written, and their number is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from areal.errors import ArealError
from areal.services.http.errors import ApiError
from areal.services.weight_transfer.memory import MemoryLease
from areal.services.weight_update.staging import FolderPublisher, StagedWeights, copy_model


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[FolderPublisher]:
    made = FolderPublisher(tmp_path / "weights", in_memory=True)
    yield made
    made.remove()


def weights(value: float) -> list[tuple[str, Tensor]]:
    return [("a", torch.full((3, 5), value)), ("b", torch.full((7,), value))]


def written(folders: FolderPublisher, version: int) -> StagedWeights:
    folders.write(version, weights(version))
    assert folders.staged is not None
    return folders.staged


def lease(published: StagedWeights) -> MemoryLease:
    return MemoryLease(published.folder / "model.safetensors")


def value(published: StagedWeights) -> float:
    """What is in the folder; it raises where that is not one version."""
    held = load_file(published.folder / "model.safetensors")
    (found,) = {float(number) for tensor in held.values() for number in tensor.view(-1)}
    return found


def test_writes_alternate_between_two_buffers(folders: FolderPublisher) -> None:
    seen = set()
    for version in range(6):
        published = written(folders, version)
        seen.add((published.folder / "model.safetensors").stat().st_ino)
        reader = lease(published)
        assert value(published) == version
        reader.end()
    assert len(seen) == 2


def test_write_never_touches_leased_buffers(folders: FolderPublisher) -> None:
    published = [written(folders, 0)]
    leases = [lease(published[0])]
    for version in range(1, 6):  # every reader stays
        held = [load_file(each.folder / "model.safetensors") for each in published[-2:]]
        published.append(written(folders, version))
        leases.append(lease(published[-1]))
        assert [float(each["a"][0, 0]) for each in held] == [float(each.version) for each in published[-3:-1]]
        assert len(list(folders.root.glob("*/model.safetensors"))) == min(version + 1, 3)
    for each in leases:
        each.end()
    assert [value(each) for each in published[-3:]] == [3.0, 4.0, 5.0]
    for version in (6, 7):
        assert value(written(folders, version)) == version
    assert len(list(folders.root.glob("*/model.safetensors"))) == 2  # what is not needed any more is given back


def test_failed_write_keeps_newest_version(folders: FolderPublisher) -> None:
    kept = written(folders, 1)
    half = written(folders, 2).folder

    def torn() -> Iterator[tuple[str, Tensor]]:
        yield weights(3)[0]
        raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="lost"):
        folders.write(3, torn())
    assert folders.staged_file(2) == half / "model.safetensors"
    assert value(StagedWeights(2, half, 0)) == 2
    with pytest.raises(BlockingIOError):
        lease(kept)
    assert value(written(folders, 4)) == 4
    assert value(StagedWeights(2, half, 0)) == 2
    assert folders.staged_file(4) == kept.folder / "model.safetensors"


@pytest.fixture
def on_disk(tmp_path: Path) -> FolderPublisher:
    (tmp_path / "config.json").write_text("{}")
    return FolderPublisher(tmp_path / "weights", in_memory=False, config_files=(tmp_path / "config.json",))


def test_disk_keeps_two_newest_versions(on_disk: FolderPublisher) -> None:
    for version in (0, 9, 10, 10, 11):  # 10 is written again, as after an update that failed
        published = written(on_disk, version)
        assert value(published) == version
        assert (published.folder / "config.json").read_text() == "{}"
    assert {path.name for path in on_disk.root.iterdir()} == {"v10", "v11"}
    assert on_disk.root.stat().st_mode & 0o777 == 0o700
    assert [on_disk.staged_file(version) is not None for version in (9, 10, 11, 12)] == [False, True, True, False]
    on_disk.remove()
    assert not on_disk.root.exists()


def test_offer_removes_leftovers_of_killed_trainer(on_disk: FolderPublisher) -> None:
    on_disk.root.mkdir()
    (on_disk.root / "v3.tmp").mkdir()
    (on_disk.root / "mark-1").write_text("old")
    written(on_disk, 2)
    offer = on_disk.offer()
    assert {path.name for path in on_disk.root.iterdir()} == {"v2", offer["mark"]}
    assert (on_disk.root / offer["mark"]).read_text() == offer["word"]


def test_only_staged_version_is_published(folders: FolderPublisher) -> None:
    with pytest.raises(ApiError, match="the trainer has nothing"):
        folders.published(0)
    staged = written(folders, 4)
    assert folders.published(4) == {"source": {"path": str(staged.folder)}, "bytes": staged.bytes}
    assert staged.bytes == sum(tensor.nbytes for _, tensor in weights(4))
    with pytest.raises(ApiError, match="version 5 is not staged: the trainer has version 4") as refused:
        folders.published(5)
    assert refused.value.status == 409


def test_weights_missing_a_tensor_are_refused_by_name(folders: FolderPublisher) -> None:
    for version in (1, 2):
        written(folders, version)
    with pytest.raises(ArealError, match="weights lack b"):
        folders.write(3, weights(3)[:1])


def test_copied_model_replaces_old_one_privately(tmp_path: Path, on_disk: FolderPublisher) -> None:
    file = written(on_disk, 1).folder / "model.safetensors"
    place = tmp_path / "served" / "v1"
    place.mkdir(parents=True)
    (place / "old").touch()
    copy_model(file, on_disk.config_files, place)
    assert {path.name for path in place.iterdir()} == {"model.safetensors", "config.json"}
    assert (place.stat().st_mode & 0o777, value(StagedWeights(1, place, 0))) == (0o700, 1.0)
    assert [path.name for path in place.parent.iterdir()] == ["v1"]
