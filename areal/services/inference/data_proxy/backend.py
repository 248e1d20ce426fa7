"""``/configure_backend``: another engine process of the same kind takes over, while the data proxy runs."""

from __future__ import annotations

from collections.abc import Mapping

from areal.services.inference.data_proxy.control import EngineControl
from areal.services.inference.engines.base import TokenEngine
from areal.services.inference.engines.clients import open_engine
from areal.services.inference.router.registry import worker_base_url
from areal.services.web.access import Access
from areal.services.web.body import read_object
from areal.services.web.client import HttpClient
from areal.services.web.errors import ApiError, bad_request
from areal.services.web.server import Request, Response
from areal.services.web.service import Service, json_response

_BODY_BYTES = 64 * 1024


class BackendRoute:
    def __init__(
        self,
        kind: str,
        engine: TokenEngine,
        control: EngineControl,
        http: HttpClient,
        headers: Mapping[str, str],
        url: str,
    ) -> None:
        self._kind = kind
        self.url = url  # of the engine that is driven
        self._engine = engine
        self._control = control
        self._http = http
        self._headers = dict(headers)

    def add_to(self, service: Service) -> None:
        service.route("POST", "/configure_backend", self.configure, Access.ADMIN)

    async def configure(self, request: Request) -> Response:
        """Only an engine that is ready takes over. Calls that run end where they began. Raises 400, 502."""
        given = (await read_object(request, _BODY_BYTES)).get("backend_addr")
        if not isinstance(given, str):
            raise bad_request("backend_addr must be the engine's address, host:port", param="backend_addr")
        try:
            url = worker_base_url(given)
        except ValueError as error:
            raise bad_request(str(error), param="backend_addr") from error
        state = await open_engine(self._kind, self._http, url, self._headers).state()
        if state.not_ready is not None:
            message = f"no {self._kind} engine is ready at {url}: {state.not_ready}"
            raise ApiError(502, message, code="engine_unavailable", param="backend_addr")
        async with self._control.exclusively():
            self._engine.point_to(url)
            self.url = url
            self._control.engine_changed()
        return json_response({"status": "ok", "backend_addr": url})
