"""``/export_trajectories`` and ``/trajectories``: training rows for whoever names sessions, or takes any."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import orjson

from areal.services.inference.recording.commits import elsewhere
from areal.services.inference.recording.exporting import ExportRequest, read_export_request
from areal.services.inference.recording.journal import Journal
from areal.services.inference.recording.leases import Leases
from areal.services.inference.recording.names import ExportName, GroupName, LeaseName, SessionName
from areal.services.inference.recording.npz import npz
from areal.services.inference.recording.rows import Export
from areal.services.inference.recording.session import read_kind
from areal.services.inference.recording.vault import Vault
from areal.services.web import headers as names
from areal.services.web.access import Access
from areal.services.web.body import read_object
from areal.services.web.errors import ApiError, bad_request
from areal.services.web.server import Request, Response
from areal.services.web.service import Service, json_response

_BODY_BYTES = 4 * 1024 * 1024
_LONGEST_WAIT_S = 300.0
_MOST_ITEMS = 1024
_MOST_SKIPPED = 100
JSON, NPZ = "json", "npz"


class ExportRoutes:
    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self._leases = Leases(vault, lambda code: self._errors.labels(code).inc())

    def add_to(self, service: Service) -> None:
        counter = service.metrics.counter
        self._exports = counter("areal_exports_total", "Exports answered, repeated ones too.")
        self._rows = counter("areal_exported_rows_total", "Training rows in those answers.")
        self._acknowledged = counter("areal_exports_acknowledged_total", "Exports that were received, and are gone.")
        self._errors = counter(
            "areal_trajectory_errors_total", "Trajectories left out of an export or skipped by leases.", ("code",)
        )
        service.route("POST", "/export_trajectories", self.export, Access.ADMIN)
        service.route("POST", "/export_trajectories/ack", self.acknowledge_exports, Access.ADMIN)
        service.route("GET", "/trajectories", self.lend, Access.ADMIN)
        service.route("POST", "/trajectories/ack", self.acknowledge_leases, Access.ADMIN)

    async def export(self, request: Request) -> Response:
        """With ``dry_run`` nothing is taken: the answer says whether it could be, and of what kind it is."""
        data = await read_object(request, _BODY_BYTES)
        form = data.get("format") or JSON
        if form not in (JSON, NPZ):
            raise bad_request(f"format must be {JSON} or {NPZ}", param="format")
        self._name_the_group(data)
        wanted = replace(read_export_request(data), columns_only=form == NPZ)
        journal = self._journal(wanted)
        if data.get("dry_run") is True:
            await journal.check_export(wanted)
            return json_response({"status": "ok"})
        kept, export = await journal.export(wanted)
        self._exports.inc()
        self._rows.inc(len(export.rows))
        for error in export.errors:
            self._errors.labels(error["code"]).inc()
        return await asyncio.to_thread(_answer, str(kept.name), export, form)

    def _name_the_group(self, data: dict[str, Any]) -> None:
        """A group alone stands for all its sessions."""
        group_id = data.get("group_id")
        if group_id is None or data.get("session_ids"):
            return
        group = GroupName.parse(group_id) if isinstance(group_id, str) else None
        journal = self._vault.journal(group.tag) if group is not None else None
        if group is None or journal is None:
            raise ApiError(404, f"no group {group_id!r}", code="group_not_found", param="group_id")
        data["session_ids"] = [name for _, name in journal.members(group)]

    def _journal(self, wanted: ExportRequest) -> Journal:
        """The one journal of all these sessions. Raises 404, 421, and 400 for sessions of several journals, which only
        the gateway puts together."""
        parsed = [SessionName.parse(session_id) for session_id in wanted.session_ids]
        for session_id, name in zip(wanted.session_ids, parsed, strict=True):
            if name is None:
                raise ApiError(404, f"no session {session_id!r}", code="session_not_found", param="session_ids")
        tags = {name.tag for name in parsed if name is not None}
        if len(tags) > 1:
            message = "these sessions are recorded in several places: export them through the gateway"
            raise bad_request(message, param="session_ids", code="several_journals")
        journal = self._vault.journal(tags.pop())
        if journal is None:
            raise elsewhere()
        return journal

    async def acknowledge_exports(self, request: Request) -> Response:
        export_id = (await read_object(request, _BODY_BYTES)).get("export_id")
        name = ExportName.parse(export_id) if isinstance(export_id, str) else None
        if name is None:
            raise bad_request("export_id must be that of an export", param="export_id")
        journal = self._vault.journal(name.tag)
        if journal is None:
            raise elsewhere()
        released = await journal.acknowledge(name)
        self._acknowledged.inc(int(released))
        return json_response({"status": "ok", "released": released})

    async def lend(self, request: Request) -> Response:
        """With ``limit=0`` nothing is lent; the answer says whether anything could be. ``skipped`` names what is ready
        and cannot be handed out."""
        wait_s, limit = _wait(request.query.get("wait")), _items(request.query.get("limit"))
        kind = read_kind(request.query.get("kind"))
        if limit == 0:
            return json_response({"items": [], "ready": await self._leases.wait_for_any(wait_s, kind)})
        lent = await self._leases.lend(limit, wait_s, kind)
        try:
            items = [
                {
                    "lease_id": str(each.lease),
                    "session_id": each.session_id,
                    "trajectory_id": each.trajectory,
                    "traj": each.export.traj(),
                    "rows": each.export.rows,
                }
                for each in lent
            ]
            skipped = list(self._leases.skipped.values())
            more = {"skipped": skipped[:_MOST_SKIPPED], "skipped_count": len(skipped)}
            response = json_response({"items": items, **more})
            await request.answer(response)
        except BaseException:
            self._leases.give_back(each.lease for each in lent)
            raise
        return response

    async def acknowledge_leases(self, request: Request) -> Response:
        given = (await read_object(request, _BODY_BYTES)).get("lease_ids")
        leases = [LeaseName.parse(item) if isinstance(item, str) else None for item in given or ()]
        if not isinstance(given, list) or None in leases:
            raise bad_request("lease_ids must be a list of lease ids", param="lease_ids")
        known = [lease for lease in leases if lease is not None]
        if any(self._vault.journal(lease.tag) is None for lease in known):
            raise elsewhere()
        return json_response({"status": "ok", "released": await self._leases.acknowledge(known)})


def _answer(export_id: str, export: Export, form: str) -> Response:
    more = {"rows": export.rows, "failures": export.failures, "errors": export.errors, "export_id": export_id}
    if form == JSON:
        return json_response({"traj": export.traj(), **more})
    body = npz(export.columns, {"about.json": orjson.dumps({**more, "interactions": export.interactions})})
    headers = {names.EXPORT_ID: export_id}
    return Response(body=body, content_type="application/octet-stream", headers=headers)


def _wait(text: str | None) -> float:
    try:
        wait_s = float(text or 0)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= _LONGEST_WAIT_S:
        raise bad_request(f"wait must be between 0 and {_LONGEST_WAIT_S:g} seconds", param="wait")
    return wait_s


def _items(text: str | None) -> int:
    if text is None:
        return 1
    if not text.isascii() or not text.isdecimal() or int(text) > _MOST_ITEMS:
        raise bad_request(f"limit must be a whole number up to {_MOST_ITEMS}", param="limit")
    return int(text)
