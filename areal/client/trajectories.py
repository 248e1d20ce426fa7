"""Exported trajectories: columns as NumPy arrays, or as torch tensors of the same memory.

    input_ids int64, loss_mask int64, logprobs float32, versions int64, turn_ids int32, attention_mask bool   [B, S]
    rewards float32, original_rewards float32, temperatures float32                                            [B]

If the turns of a row have different temperatures, its entry in ``temperatures`` is NaN, and the additional column
``token_temperatures`` float32 [B, S] has the temperature of each token, 1 on prompt tokens.

A row is an interaction (``individual``) or a leaf of the conversation tree (``concat``); ``rows`` describes each row.
Calls of external models have no tokens: they are in ``interactions``.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from areal.dataclasses import dataclass, field
from areal.wire.columns import (
    COLUMNS,
    ExportAnswer,
    ExportedInteraction,
    ExportedRow,
    ExportError,
    FailedCalls,
    LeasedExport,
)

if TYPE_CHECKING:
    import torch

_DTYPES = {name: column.dtype for name, column in COLUMNS.items()}


@dataclass(frozen=True)
class Trajectories:
    """Exported trajectories. ``failures``: counts of failed calls by code; such calls have no reward. ``errors``: the
    trajectories that could not be exported; they stay in the service."""

    columns: Mapping[str, np.ndarray[Any, Any]]
    rows: Sequence[ExportedRow]
    export_id: str | None = None
    interactions: Sequence[ExportedInteraction] = ()
    failures: Sequence[FailedCalls] = ()
    errors: Sequence[ExportError] = ()

    @property
    def token_rows(self) -> Sequence[ExportedRow]:
        """The entries of ``rows`` that describe the columns' rows; those of ``interactions`` follow them."""
        return self.rows[: len(self.rows) - len(self.interactions)]

    def __len__(self) -> int:
        return len(self.rows)

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        return dict(self.columns)

    def torch(self) -> dict[str, torch.Tensor]:
        """Return the columns as tensors on the CPU, sharing their memory."""
        import torch

        return {name: torch.from_numpy(column) for name, column in self.columns.items()}


@dataclass(frozen=True)
class Lease:
    """A trajectory that is leased in online mode. It is offered again unless it is acknowledged in time."""

    lease_id: str
    session_id: str
    trajectory_id: int
    trajectories: Trajectories = field(repr=False)


def from_json(data: ExportAnswer) -> Trajectories:
    traj = data["traj"]
    return Trajectories(
        {name: np.asarray(values, _DTYPES.get(name)) for name, values in traj.items() if name != "interactions"},
        data["rows"],
        data.get("export_id"),
        traj.get("interactions") or (),
        data.get("failures") or (),
        data.get("errors") or (),
    )


def from_npz(body: bytes) -> Trajectories:
    """Read trajectories from an npz archive. Pickled data is refused, so that nothing in the archive is executed."""
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        about = orjson.loads(archive.read("about.json"))
        columns = {
            name.removesuffix(".npy"): np.lib.format.read_array(io.BytesIO(archive.read(name)), allow_pickle=False)
            for name in archive.namelist()
            if name.endswith(".npy")
        }
    rest = (about.get(name) or () for name in ("interactions", "failures", "errors"))
    return Trajectories(columns, about["rows"], about["export_id"], *rest)


def lease_from_json(data: LeasedExport) -> Lease:
    return Lease(data["lease_id"], data["session_id"], data["trajectory_id"], from_json(data))
