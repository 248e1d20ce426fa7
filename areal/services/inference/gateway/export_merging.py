"""Exports of several data proxies as one: the same columns, padded to one width, rows in the order of the request."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import orjson

from areal.services.inference.recording.npz import npz
from areal.services.inference.recording.rows import KINDS, PADDINGS, Column
from areal.services.web import headers as names
from areal.services.web.server import Response
from areal.services.web.service import json_response

_BY_TOKEN = "token_temperatures"


def merged_answer(
    parts: Sequence[bytes], session_ids: Sequence[str], form: str, errors: Sequence[dict[str, Any]] = ()
) -> Response:
    """``parts`` are whole JSON exports; ``errors`` are of those that gave none. To be run off the event loop."""
    exports = [orjson.loads(part) for part in parts]
    export_id = "~".join(export["export_id"] for export in exports)
    tokens, texts = _order(exports, session_ids, "tokens"), _order(exports, session_ids, "text")
    more = {
        "rows": [about for _, about, _ in (*tokens, *texts)],
        "failures": [failure for export in exports for failure in export["failures"]],
        "errors": [error for export in exports for error in export["errors"]] + list(errors),
        "export_id": export_id,
    }
    interactions = [part["traj"]["interactions"][row] for part, _, row in texts]
    differing = any(_BY_TOKEN in part["traj"] for part, _, _ in tokens)
    traj = {
        name: _column([_cell(part["traj"], name, row) for part, _, row in tokens], name)
        for name in (KINDS if tokens or not texts else ())
        if name != _BY_TOKEN or differing
    }
    if form == "json":
        return json_response({"traj": {**traj, **({"interactions": interactions} if texts else {})}, **more})
    about = orjson.dumps({**more, "interactions": interactions})
    body = npz([_packed(name, values) for name, values in traj.items()], {"about.json": about})
    return Response(body=body, content_type="application/octet-stream", headers={names.EXPORT_ID: export_id})


def _order(
    exports: Sequence[dict[str, Any]], session_ids: Sequence[str], kind: str
) -> list[tuple[dict[str, Any], dict[str, Any], int]]:
    """Export, entry in ``rows`` and place among the rows of this kind, by the session's place in the request."""
    place = {session_id: number for number, session_id in enumerate(session_ids)}
    rows = [
        (place[about["session_id"]], part, row)
        for part, export in enumerate(exports)
        for row, about in enumerate(each for each in export["rows"] if each["kind"] == kind)
    ]
    of_kind = [[each for each in export["rows"] if each["kind"] == kind] for export in exports]
    return [(exports[part], of_kind[part][row], row) for _, part, row in sorted(rows)]


def _cell(traj: dict[str, Any], name: str, row: int) -> Any:
    """``_BY_TOKEN`` is there only where rows of its export need it. JSON's null is NaN."""
    if name == _BY_TOKEN and name not in traj:
        temperature = traj["temperatures"][row]
        return [temperature if is_answer else 1.0 for is_answer in traj["loss_mask"][row]]
    value = traj[name][row]
    return math.nan if value is None else value


def _column(values: list[Any], name: str) -> list[Any]:
    if not values or not isinstance(values[0], list):
        return values
    width, padding = max(map(len, values)), PADDINGS[name]
    return [row + [padding] * (width - len(row)) for row in values]


def _packed(name: str, values: list[Any]) -> Column:
    kind = KINDS[name]
    nested = bool(values) and isinstance(values[0], list)
    flat = [item for row in values for item in row] if nested else values
    shape = (len(values), len(values[0])) if nested else (len(values),)
    data = bytes(flat) if kind == "|b1" else array({"<i8": "q", "<i4": "i", "<f4": "f"}[kind], flat).tobytes()
    return Column(name, kind, shape, data)
