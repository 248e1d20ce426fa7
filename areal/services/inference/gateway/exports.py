"""``/export_trajectories`` and ``/trajectories`` at the gateway: what several data proxies recorded, as one answer.

Sessions of one data proxy are passed through. For several, each is asked first whether it could answer, and takes
nothing unless all can; then their rows are put together in the order of the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from areal.services.inference.gateway.journal_client import JournalClient, Said
from areal.services.inference.gateway.sessions import passed_on, read_limit, tag_of_session
from areal.services.inference.recording.names import ExportName, GroupName, LeaseName
from areal.services.inference.recording.packing import CorruptRecord
from areal.services.inference.recording.rows import RewardOverflow
from areal.services.inference.recording.session import read_kind
from areal.services.inference.router.table import WorkerEntry
from areal.services.web import headers as names
from areal.services.web.access import Access
from areal.services.web.body import decode_object, read_body, read_object
from areal.services.web.errors import ApiError, bad_request
from areal.services.web.server import Request, Response
from areal.services.web.service import Service, json_response

_BODY_BYTES = 4 * 1024 * 1024
_EXPORT_S = 600.0
_LOOK_AGAIN_S = 0.5
_BETWEEN = "~"  # in the id of an export that several data proxies hold
_PATH = "/export_trajectories"
UNEXPORTABLE = (CorruptRecord.code, RewardOverflow.code)


class ExportRoutes:
    def __init__(self, journals: JournalClient) -> None:
        self._journals = journals

    def add_to(self, service: Service) -> None:
        service.route("POST", _PATH, self.export, Access.ADMIN)
        service.route("POST", f"{_PATH}/ack", self.acknowledge_export, Access.ADMIN)
        service.route("GET", "/trajectories", self.lend, Access.ADMIN)
        service.route("POST", "/trajectories/ack", self.acknowledge_leases, Access.ADMIN)

    async def export(self, request: Request) -> Response:
        body = await read_body(request, _BODY_BYTES)
        data = decode_object(body)
        places = _places(data)
        if len(places) == 1:
            headers = self._journals.for_admin(request)
            said = await self._journals.ask(next(iter(places)), "POST", _PATH, headers, body, _EXPORT_S)
            answer = passed_on(said)
            if (export_id := said.headers.get(names.EXPORT_ID)) is not None:
                answer.headers[names.EXPORT_ID] = export_id
            return answer
        return await self._several(data, places, self._journals.for_admin(request))

    async def _several(
        self, data: dict[str, Any], places: Mapping[str, list[str]], headers: Mapping[str, str]
    ) -> Response:
        form = data.get("format") or "json"
        if form not in ("json", "npz"):
            raise bad_request("format must be json or npz", param="format")
        common = {name: value for name, value in data.items() if name != "group_id"} | {"format": "json"}
        checks = await self._ask_each(places, {**common, "format": form, "dry_run": True}, headers)
        damaged = {tag: said for tag, said in zip(places, checks, strict=True) if _is_damaged(said)}
        refusals = [said for said in checks if said.status != 200 and not _is_damaged(said)]
        if refusals or len(damaged) == len(places):
            return passed_on((refusals or checks)[0])
        sound = {tag: ids for tag, ids in places.items() if tag not in damaged}
        parts = await self._ask_each(sound, common, headers)
        if (refusal := next((said for said in parts if said.status != 200), None)) is not None:
            return passed_on(refusal)
        errors = [
            {"session_id": session_id, "trajectory_id": None, **_error_of(said)}
            for tag, said in damaged.items()
            for session_id in places[tag]
        ]
        from areal.services.inference.gateway.export_merging import merged_answer

        bodies = [said.body for said in parts]
        return await asyncio.to_thread(merged_answer, bodies, data["session_ids"], form, errors)

    async def _ask_each(
        self, places: Mapping[str, list[str]], common: Mapping[str, Any], headers: Mapping[str, str]
    ) -> list[Said]:
        bodies = {tag: orjson.dumps({**common, "session_ids": ids}) for tag, ids in places.items()}
        asks = [self._journals.ask(tag, "POST", _PATH, headers, body, _EXPORT_S) for tag, body in bodies.items()]
        return list(await asyncio.gather(*asks))

    async def acknowledge_export(self, request: Request) -> Response:
        export_id = (await read_object(request, _BODY_BYTES)).get("export_id")
        parts = export_id.split(_BETWEEN) if isinstance(export_id, str) else []
        parsed = [ExportName.parse(part) for part in parts]
        if not parsed or None in parsed:
            raise bad_request("export_id must be that of an export", param="export_id")
        released = False
        for name in parsed:
            assert name is not None
            body = orjson.dumps({"export_id": str(name)})
            said = await self._journals.ask(name.tag, "POST", f"{_PATH}/ack", self._journals.for_admin(request), body)
            if said.status != 200:
                return passed_on(said)
            released = released or orjson.loads(said.body)["released"]
        return json_response({"status": "ok", "released": released})

    async def lend(self, request: Request) -> Response:
        """From every data proxy that has something, none waiting for another."""
        keepers, headers = self._journals.keepers(), self._journals.for_admin(request)
        wait_s = _wait(request.query.get("wait"))
        if len(keepers) == 1:
            said = await self._journals.at(keepers[0], request.target, headers, wait_s + 30.0)
            if said is not None and said.status != 503:
                return passed_on(said)
        limit = read_limit(request.query.get("limit"), default=1, most=1024)
        wanted = read_kind(request.query.get("kind"))
        kind = f"&kind={wanted.name.lower()}" if wanted is not None else ""
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            items, more = await self._lend_now(keepers, limit, kind, headers)
            left = deadline - asyncio.get_running_loop().time()
            if items or left <= 0:
                return json_response({"items": items, **more})
            await self._wait_for_any(keepers, left, kind, headers)
            keepers = self._journals.keepers()

    async def _lend_now(
        self, keepers: Sequence[WorkerEntry], limit: int, kind: str, headers: Mapping[str, str]
    ) -> tuple[list[Any], dict[str, Any]]:
        """What is lent, and what is not: trajectories that were skipped, and journals that nobody answers for."""
        items: list[Any] = []
        skipped: list[Any] = []
        away: list[str] = []
        count = 0
        for worker in keepers:
            if len(items) == limit:
                break
            said = await self._journals.at(worker, f"/trajectories?limit={limit - len(items)}{kind}", headers, 60.0)
            if said is None or said.status != 200:
                away += worker.journals
                continue
            answer = said.object()
            items += answer["items"]
            skipped += answer["skipped"]
            count += answer["skipped_count"]
        return items, {"skipped": skipped, "skipped_count": count, "journals_away": sorted(away)}

    async def _wait_for_any(
        self, keepers: Sequence[WorkerEntry], wait_s: float, kind: str, headers: Mapping[str, str]
    ) -> None:
        """Return when some data proxy says that it has something; a table that changes meanwhile is looked at soon."""
        wait_s = min(wait_s, 10.0)
        path = f"/trajectories?limit=0&wait={wait_s:g}{kind}"
        asks = {
            asyncio.create_task(self._journals.at(worker, path, headers, wait_s + 10.0), name=f"wait-{worker.id}")
            for worker in keepers
        }
        try:
            while asks:
                done, asks = await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED)
                if any(_has_some(task.result()) for task in done):
                    return
            await asyncio.sleep(min(wait_s, _LOOK_AGAIN_S))  # nobody has anything, or nobody answers
        finally:
            for task in asks:
                task.cancel()
            await asyncio.gather(*asks, return_exceptions=True)

    async def acknowledge_leases(self, request: Request) -> Response:
        given = (await read_object(request, _BODY_BYTES)).get("lease_ids")
        by_tag: dict[str, list[str]] = {}
        for item in given if isinstance(given, list) else [None]:
            lease = LeaseName.parse(item) if isinstance(item, str) else None
            if lease is None:
                raise bad_request("lease_ids must be a list of lease ids", param="lease_ids")
            by_tag.setdefault(lease.tag, []).append(str(lease))
        released = 0
        headers = self._journals.for_admin(request)
        for tag, leases in by_tag.items():
            body = orjson.dumps({"lease_ids": leases})
            said = await self._journals.ask(tag, "POST", "/trajectories/ack", headers, body)
            if said.status != 200:
                return passed_on(said)
            released += orjson.loads(said.body)["released"]
        return json_response({"status": "ok", "released": released})


def _places(data: Mapping[str, Any]) -> dict[str, list[str]]:
    """The sessions asked for, by journal. Raises 400, 404."""
    ids, group_id = data.get("session_ids"), data.get("group_id")
    if not ids and isinstance(group_id, str):
        group = GroupName.parse(group_id)
        if group is None:
            raise ApiError(404, f"no group {group_id!r}", code="group_not_found", param="group_id")
        return {group.tag: []}
    if not isinstance(ids, list) or not ids or not all(isinstance(item, str) for item in ids):
        raise bad_request("session_ids must be a list of session ids, not an empty one", param="session_ids")
    places: dict[str, list[str]] = {}
    for session_id in ids:
        places.setdefault(tag_of_session(session_id), []).append(session_id)
    return places


def _is_damaged(said: Said) -> bool:
    """Whether nothing of what this data proxy was asked for can be exported."""
    return said.status == 500 and _error_of(said)["code"] in UNEXPORTABLE


def _error_of(said: Said) -> dict[str, Any]:
    error = said.object()["error"]
    return {"code": error["code"], "message": error["message"]}


def _has_some(said: Said | None) -> bool:
    return said is not None and said.status == 200 and orjson.loads(said.body).get("ready", 0) > 0


def _wait(text: str | None) -> float:
    try:
        wait_s = float(text or 0)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= 300.0:
        raise bad_request("wait must be between 0 and 300 seconds", param="wait")
    return wait_s
