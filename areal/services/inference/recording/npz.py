"""NumPy's ``.npz`` written by hand: the format is a zip of arrays with a one-line header, and importing NumPy would
cost every data proxy more memory than all its sessions.

Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Mapping

from areal.services.inference.recording.rows import Column

_MAGIC = b"\x93NUMPY\x01\x00"
_ALIGNMENT = 64


def npz(columns: Iterable[Column], more: Mapping[str, bytes]) -> bytes:
    """A ``.npz`` with one array a column. ``more``: members that are no arrays, which NumPy gives as bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for column in columns:
            archive.writestr(f"{column.name}.npy", npy(column))
        for name, data in more.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def npy(column: Column) -> bytes:
    header = repr({"descr": column.kind, "fortran_order": False, "shape": column.shape}).encode("ascii")
    length = len(_MAGIC) + 2 + len(header) + 1
    header += b" " * (-length % _ALIGNMENT) + b"\n"
    return _MAGIC + len(header).to_bytes(2, "little") + header + column.data
