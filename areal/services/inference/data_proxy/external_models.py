"""External models that a data proxy serves in addition to its own model, registered while it runs.

Registrations are stored in a file beside the journals, so that a restarted process still serves the models of its
sessions. The file contains the providers' API keys and is readable by its owner only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from areal.dataclasses import asdict, dataclass, field
from areal.files import replace_file
from areal.resources.addresses import ExternalUrl, UrlError, parse_external_url
from areal.services.http.auth import Access
from areal.services.http.errors import ApiError, bad_field
from areal.services.http.messages import AnyResponse, Request, Response, decode_object, read_body, read_object
from areal.services.http.service import Handler, Service, json_response
from areal.services.inference.data_proxy.sessions import CallRecorders
from areal.services.inference.engines.base import Dialect
from areal.wire.bodies import RegisterExternal
from areal.wire.processes import DataProxyConfig

if TYPE_CHECKING:  # without registered models, a data proxy starts without importing a client of external APIs
    import aiohttp

    from areal.services.inference.engines.external import ExternalApi

_log = logging.getLogger(__name__)
_BODY_BYTES = 64 * 1024


@dataclass(frozen=True)
class ExternalRegistration:
    """The registration of an external model. ``model``: the provider's name of the model."""

    name: str
    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    api: str = Dialect.OPENAI
    allow_private: bool = False

    @property
    def parsed_url(self) -> ExternalUrl:
        """Raises UrlError."""
        return parse_external_url(self.url, allow_private=self.allow_private)


@dataclass(frozen=True)
class ExternalModel:
    """An external model that is served."""

    registered: ExternalRegistration
    http: aiohttp.ClientSession
    api: ExternalApi
    handlers: Mapping[str, Handler]


def open_external(registered: ExternalRegistration, recorders: CallRecorders, config: DataProxyConfig) -> ExternalModel:
    """Open the API of an external model. Raises UrlError."""
    from areal.services.inference.data_proxy.external import ExternalCalls, external_handlers
    from areal.services.inference.engines.external import ExternalApi, open_checked_session

    url, dialect = registered.parsed_url, Dialect(registered.api)
    http = open_checked_session(url, allow_private=registered.allow_private)
    api = ExternalApi(http, url, registered.model, registered.api_key, dialect)
    calls = ExternalCalls(registered.name, api, recorders, config)
    return ExternalModel(registered, http, api, external_handlers(calls, dialect))


@dataclass(eq=False)
class ExternalModels:
    """The external models of a data proxy, and the routes that register them. ``_file``: stores registrations across
    restarts."""

    _config: DataProxyConfig
    _recorders: CallRecorders
    _file: Path | None
    _served: dict[str, ExternalModel] = field(default_factory=dict, init=False)
    _sessions: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack, init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @property
    def names(self) -> list[str]:
        """The names of all served models."""
        return [self._config.model, *self._served]

    def add_to(self, service: Service) -> None:
        service.route("POST", "/register_model", self.register, Access.ADMIN)
        service.route("POST", "/deregister_model", self.deregister, Access.ADMIN)
        service.add_lifespan(self._living)

    def route_of(self, path: str, own: Handler) -> Handler:
        """Return the handler of a path for every model: ``own``, unless the request names an external model."""

        async def handle(request: Request) -> AnyResponse:
            if not self._served:
                return await own(request)
            name = decode_object(await request.read(self._config.max_body_bytes)).get("model")
            served = self._served.get(name) if isinstance(name, str) else None
            return await (served.handlers[path] if served is not None else own)(request)

        return handle

    async def register(self, request: Request) -> Response:
        """Register an external model; its API must respond and accept the key. With ``dry_run`` the model is only
        checked. Raises 400, 409, 502, 507."""
        body = await read_body(request, RegisterExternal, _BODY_BYTES)
        registered = _registered(body, self._config.model)
        async with self._lock:
            served = open_external(registered, self._recorders, self._config)
            why = (await served.api.state()).not_ready
            if why is not None or body.dry_run:
                await served.http.close()
            if why is not None:
                raise ApiError(502, f"the external API cannot be used: {why}", code="external_unavailable", param="url")
            if not body.dry_run:
                self._sessions.push_async_callback(served.http.close)
                await self._put(registered.name, served)
        return json_response({"status": "ok", "name": registered.name})

    async def deregister(self, request: Request) -> Response:
        name = (await read_object(request, _BODY_BYTES)).get("name")
        async with self._lock:
            if not isinstance(name, str) or name not in self._served:
                raise ApiError(404, f"no external model {name!r}", code="model_not_found", param="name")
            await self._put(name, None)
        return json_response({"status": "ok", "name": name})

    async def _put(self, name: str, served: ExternalModel | None) -> None:
        """Write the registrations to disk, then use them. ``served`` None removes the model. Running calls keep the
        earlier registration, whose connections are closed when the process ends. Raises ApiError 507."""
        wanted = {key: value for key, value in self._served.items() if key != name}
        if served is not None:
            wanted[name] = served
        if self._file is not None:
            try:
                content = orjson.dumps([asdict(each.registered) for each in wanted.values()])
                await asyncio.to_thread(replace_file, self._file, content, mode=0o600, durable=True)
            except OSError as error:
                message = f"the registration cannot be saved: {error.strerror}"
                raise ApiError(507, message, code="store_failed") from error
        self._served = wanted

    @contextlib.asynccontextmanager
    async def _living(self) -> AsyncIterator[None]:
        async with self._sessions:
            for registered in await asyncio.to_thread(_read, self._file):
                try:
                    served = open_external(registered, self._recorders, self._config)
                    self._served[registered.name] = served
                except ValueError as error:
                    _log.error("the external model %s is no longer served: %s", registered.name, error)
                else:
                    self._sessions.push_async_callback(served.http.close)
            yield


def _registered(body: RegisterExternal, own: str) -> ExternalRegistration:
    """Return the registration in a request. Raises 400, 409."""
    if body.names is None:
        raise bad_field("name", "must be the model's: letters, digits and -._:/")
    name, model = body.names
    if name == own:
        raise ApiError(
            409, f"{own!r} is the name of a model that this data proxy serves itself", code="model_exists", param="name"
        )
    if not body.url:
        raise bad_field("url", "is required: the base URL of an external API", code="missing_field")
    registered = ExternalRegistration(name, body.url, model, body.api_key or None, body.api, body.allow_private)
    try:
        _ = registered.parsed_url
    except UrlError as error:
        raise bad_field("url", f"{error.with_advice('allow_private')}") from error
    return registered


def _read(file: Path | None) -> list[ExternalRegistration]:
    try:
        return [ExternalRegistration(**item) for item in orjson.loads(file.read_bytes())] if file is not None else []
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        _log.error("the registrations in %s cannot be read: %s", file, error)
        return []
