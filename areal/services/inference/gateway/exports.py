"""``/export_trajectories`` and ``/trajectories`` at the gateway: one answer from the records of several data proxies.

An export from one data proxy is passed through. An export from several starts with a dry run at each, and proceeds only
if all dry runs succeed; then the rows are merged in the order of the request.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from areal.http import headers as names
from areal.services.http.auth import Access
from areal.services.http.errors import ApiError, bad_field
from areal.services.http.messages import Request, Response, decode_object, query_int, query_seconds, read_object
from areal.services.http.service import Service, json_response, to_response
from areal.services.inference.gateway.relay import NO_SESSION
from areal.services.inference.gateway.sessions import JournalClient, WorkerReply
from areal.services.inference.recorder.rows import KINDS, ArrayColumn, RewardOverflow, npz, parse_rows
from areal.services.inference.recorder.session import ExportName, GroupName, SessionName, parse_kind, read_leases
from areal.services.journal.storage import CorruptRecord
from areal.wire.columns import COLUMNS, ExportAnswer, ExportedRow, ExportError
from areal.wire.routing import WorkerEntry

_BODY_BYTES = 4 * 1024 * 1024
_EXPORT_S = 600.0
_LOOK_AGAIN_S = 0.5
_SEPARATOR = "~"  # in the id of an export from several data proxies
_PATH = "/export_trajectories"
UNEXPORTABLE = (CorruptRecord.code, RewardOverflow.code)


class ExportRoutes:
    def __init__(self, journals: JournalClient) -> None:
        self._journals = journals

    def add_to(self, service: Service) -> None:
        service.route("POST", _PATH, self.export, Access.ADMIN)
        service.route("POST", f"{_PATH}/ack", self.acknowledge_export, Access.ADMIN)
        service.route("GET", "/trajectories", self.lease, Access.ADMIN)
        service.route("POST", "/trajectories/ack", self.acknowledge_leases, Access.ADMIN)

    async def export(self, request: Request) -> Response:
        body = await request.read(_BODY_BYTES)
        data = decode_object(body)
        by_tag = _by_tag(data)
        if len(by_tag) == 1:
            headers = self._journals.for_admin(request)
            reply = await self._journals.call(next(iter(by_tag)), "POST", _PATH, headers, body, _EXPORT_S)
            answer = to_response(reply)
            if (export_id := reply.headers.get(names.EXPORT_ID)) is not None:
                answer.headers[names.EXPORT_ID] = export_id
            return answer
        if data.get("reward") is not None:
            raise bad_field("reward", "is for one session, and its last interaction")
        return await self._export_several(data, by_tag, self._journals.for_admin(request))

    async def _export_several(
        self, data: dict[str, Any], by_tag: Mapping[str, list[str]], headers: Mapping[str, str]
    ) -> Response:
        form = data.get("format") or "json"
        if form not in ("json", "npz"):
            raise bad_field("format", "must be json or npz")
        common = {name: value for name, value in data.items() if name != "group_id"} | {"format": "json"}
        checks = await self._call_each(by_tag, {**common, "format": form, "dry_run": True}, headers)
        damaged = {tag: reply for tag, reply in zip(by_tag, checks, strict=True) if _is_damaged(reply)}
        refusals = [reply for reply in checks if reply.status != 200 and not _is_damaged(reply)]
        if refusals or len(damaged) == len(by_tag):
            return to_response((refusals or checks)[0])
        if data.get("dry_run") is True:
            return json_response({"status": "ok"})
        sound = {tag: ids for tag, ids in by_tag.items() if tag not in damaged}
        parts = await self._call_each(sound, common, headers)
        if (refusal := next((reply for reply in parts if reply.status != 200), None)) is not None:
            return to_response(refusal)
        errors: list[ExportError] = [
            {"session_id": session_id, "trajectory_id": None, "code": error["code"], "message": error["message"]}
            for tag, reply in damaged.items()
            for error in [reply.object()["error"]]
            for session_id in by_tag[tag]
        ]
        bodies = [reply.body for reply in parts]
        return await asyncio.to_thread(merged_answer, bodies, data["session_ids"], form, errors)

    async def _call_each(
        self, by_tag: Mapping[str, list[str]], common: Mapping[str, object], headers: Mapping[str, str]
    ) -> list[WorkerReply]:
        bodies = {tag: orjson.dumps({**common, "session_ids": ids}) for tag, ids in by_tag.items()}
        calls = [self._journals.call(tag, "POST", _PATH, headers, body, _EXPORT_S) for tag, body in bodies.items()]
        return list(await asyncio.gather(*calls))

    async def acknowledge_export(self, request: Request) -> Response:
        export_id = (await read_object(request, _BODY_BYTES)).get("export_id")
        parts = export_id.split(_SEPARATOR) if isinstance(export_id, str) else []
        exports = [name for part in parts if (name := ExportName.parse(part))]
        if not exports or len(exports) < len(parts):
            raise bad_field("export_id", "must be that of an export")
        released = False
        for name in exports:
            reply = await self._acknowledge(request, name.tag, f"{_PATH}/ack", {"export_id": str(name)})
            if reply is not None and reply.status != 200:
                return to_response(reply)
            released = released or (reply is not None and reply.object()["released"])
        return json_response({"status": "ok", "released": released})

    async def lease(self, request: Request) -> Response:
        """Lease trajectories from all data proxies. Do not wait for empty ones if others have trajectories."""
        recorders, headers = self._journals.recorders(), self._journals.for_admin(request)
        wait_s = query_seconds(request, "wait", 300.0)
        if len(recorders) == 1:
            reply = await self._journals.request(recorders[0], "GET", request.target, headers, wait_s + 30.0)
            if reply is not None and reply.status != 503:
                return to_response(reply)
        limit = query_int(request, "limit", 1, 1, 1024)
        wanted = parse_kind(request.query.get("kind"))
        kind = f"&kind={wanted.name.lower()}" if wanted is not None else ""
        style, discount = parse_rows(request.query)
        rows = f"&style={style.value}&discount={discount!r}"
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            items, more = await self._lease_now(recorders, limit, kind + rows, headers)
            left = deadline - asyncio.get_running_loop().time()
            if items or left <= 0:
                return json_response({"items": items, **more})
            await self._wait_for_any(recorders, left, kind, headers)
            recorders = self._journals.recorders()

    async def _lease_now(
        self, recorders: Sequence[WorkerEntry], limit: int, query: str, headers: Mapping[str, str]
    ) -> tuple[list[Any], dict[str, object]]:
        """Return leased items, and the answer's other fields: skipped trajectories and journals of silent data
        proxies."""
        items: list[Any] = []
        skipped: list[Any] = []
        away: list[str] = []
        count = 0
        for worker in recorders:
            if len(items) == limit:
                break
            path = f"/trajectories?limit={limit - len(items)}{query}"
            reply = await self._journals.request(worker, "GET", path, headers, 60.0)
            if reply is None or reply.status != 200:
                away += worker.journals
                continue
            answer = reply.object()
            items += answer["items"]
            skipped += answer["skipped"]
            count += answer["skipped_count"]
        return items, {"skipped": skipped, "skipped_count": count, "journals_away": sorted(away)}

    async def _wait_for_any(
        self, recorders: Sequence[WorkerEntry], wait_s: float, kind: str, headers: Mapping[str, str]
    ) -> None:
        """Wait until a data proxy has a trajectory, at most 10 s, so that new data proxies are found."""
        wait_s = min(wait_s, 10.0)
        path = f"/trajectories?limit=0&wait={wait_s:g}{kind}"
        calls = {
            asyncio.create_task(
                self._journals.request(worker, "GET", path, headers, wait_s + 10.0), name=f"wait-{worker.id}"
            )
            for worker in recorders
        }
        try:
            while calls:
                done, calls = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                replies = [reply for task in done if (reply := task.result()) is not None and reply.status == 200]
                if any(reply.object().get("ready", 0) > 0 for reply in replies):
                    return
            await asyncio.sleep(min(wait_s, _LOOK_AGAIN_S))  # all are empty, or do not answer
        finally:
            for task in calls:
                task.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def acknowledge_leases(self, request: Request) -> Response:
        by_tag: dict[str, list[str]] = {}
        for lease in read_leases(await read_object(request, _BODY_BYTES)):
            by_tag.setdefault(lease.tag, []).append(str(lease))
        released = 0
        for tag, leases in by_tag.items():
            reply = await self._acknowledge(request, tag, "/trajectories/ack", {"lease_ids": leases})
            if reply is not None and reply.status != 200:
                return to_response(reply)
            released += reply.object()["released"] if reply is not None else 0
        return json_response({"status": "ok", "released": released})

    async def _acknowledge(
        self, request: Request, tag: str, path: str, body: Mapping[str, object]
    ) -> WorkerReply | None:
        """Return the answer of the data proxy with journal ``tag``, or None if the journal is gone: an adopted journal
        is deleted once all of it has been acknowledged."""
        try:
            return await self._journals.call(tag, "POST", path, self._journals.for_admin(request), orjson.dumps(body))
        except ApiError as error:
            if error.code != NO_SESSION or not self._journals.recorders():  # the journal may exist without a server
                raise
            return None


def _by_tag(data: Mapping[str, object]) -> dict[str, list[str]]:
    """Return the requested session ids by journal. Raises 400, 404."""
    ids, group_id = data.get("session_ids"), data.get("group_id")
    if not ids and isinstance(group_id, str):
        return {GroupName.require(group_id).tag: []}
    if not isinstance(ids, list) or not ids or not all(isinstance(item, str) for item in ids):
        raise bad_field("session_ids", "must be a list of session ids, not an empty one")
    by_tag: dict[str, list[str]] = {}
    for session_id in ids:
        by_tag.setdefault(SessionName.require(session_id).tag, []).append(session_id)
    if group_id is not None:
        GroupName.require(group_id).check_members(ids)
    return by_tag


def _is_damaged(reply: WorkerReply) -> bool:
    """Return whether the reply says that the records of the requested sessions cannot be exported."""
    return reply.status in (422, 500) and reply.object()["error"]["code"] in UNEXPORTABLE


# Merging exports: the same columns, padded to one width, with rows in the order of the request.

_BY_TOKEN = "token_temperatures"


def merged_answer(
    parts: Sequence[bytes], session_ids: Sequence[str], form: str, errors: Sequence[ExportError] = ()
) -> Response:
    """Merge ``parts``, the JSON exports. ``errors``: those of data proxies without an export. Run it off the event
    loop."""
    exports: list[ExportAnswer] = [orjson.loads(part) for part in parts]
    export_id = _SEPARATOR.join(export["export_id"] for export in exports)
    tokens, texts = _order(exports, session_ids, "tokens"), _order(exports, session_ids, "text")
    more = {
        "rows": [about for _, about, _ in (*tokens, *texts)],
        "failures": [failure for export in exports for failure in export["failures"]],
        "errors": [error for export in exports for error in export["errors"]] + list(errors),
        "export_id": export_id,
        "removed": not errors and all(export.get("removed", False) for export in exports),
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
    exports: Sequence[ExportAnswer], session_ids: Sequence[str], kind: str
) -> list[tuple[ExportAnswer, ExportedRow, int]]:
    """Return the rows of this kind as (export, entry in ``rows``, index in the export), in the order of
    ``session_ids``."""
    place = {session_id: number for number, session_id in enumerate(session_ids)}
    rows = [
        (place[about["session_id"]], part, row, about)
        for part, export in enumerate(exports)
        for row, about in enumerate(each for each in export["rows"] if each["kind"] == kind)
    ]
    return [(exports[part], about, row) for _, part, row, about in sorted(rows, key=lambda each: each[:3])]


def _cell(traj: Mapping[str, list[Any]], name: str, row: int) -> Any:
    """Return a row's value, NaN for null. ``_BY_TOKEN`` is computed if the export does not contain it."""
    if name == _BY_TOKEN and name not in traj:
        temperature = traj["temperatures"][row]
        return [temperature if is_answer else 1.0 for is_answer in traj["loss_mask"][row]]
    value = traj[name][row]
    return math.nan if value is None else value


def _column(values: list[Any], name: str) -> list[Any]:
    if not values or not isinstance(values[0], list):
        return values
    width, padding = max(map(len, values)), COLUMNS[name].padding
    return [row + [padding] * (width - len(row)) for row in values]


def _packed(name: str, values: list[Any]) -> ArrayColumn:
    kind = KINDS[name]
    nested = bool(values) and isinstance(values[0], list)
    flat = [item for row in values for item in row] if nested else values
    shape = (len(values), len(values[0])) if nested else (len(values),)
    data = bytes(flat) if kind == "|b1" else array({"<i8": "q", "<i4": "i", "<f4": "f"}[kind], flat).tobytes()
    return ArrayColumn(name, kind, shape, data)
