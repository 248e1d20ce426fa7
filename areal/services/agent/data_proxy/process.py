"""Construction of the data proxy's process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from areal.http.client import HttpClient
from areal.services.agent.data_proxy.inference import RlSessions
from areal.services.agent.data_proxy.journal import open_agent_journal
from areal.services.agent.data_proxy.routes import PairRoutes
from areal.services.agent.data_proxy.turns import TurnRunner, TurnSlots
from areal.services.agent.data_proxy.worker import PairWorker
from areal.services.http.lease import RouterLease
from areal.services.http.process import ServeOptions
from areal.services.http.service import Service
from areal.services.http.tasks import background
from areal.services.journal.store import JournalRoutes, serve_journals, store_details
from areal.wire.processes import AgentDataProxyConfig


@contextlib.asynccontextmanager
async def agent_data_proxy(config: AgentDataProxyConfig, options: ServeOptions) -> AsyncIterator[Service]:
    async with (
        HttpClient() as http,
        serve_journals(config.state_dir, open_agent_journal, config.adopt_after) as store,
    ):
        worker = PairWorker(config, http, options.headers)
        slots = TurnSlots(config.max_concurrent)

        def details() -> dict[str, Any]:
            return {
                "model": config.service,
                "worker_url": config.worker_url,
                "turns_running": slots.taken,
                "busy_sessions": runner.busy_sessions,
                "settings": routes.settings,
                **store_details(store),
            }

        service = Service(
            "data-proxy",
            key=options.key,
            loopback=options.loopback,
            not_ready=lambda: worker.fault or rl.fault,
            details=details,
        )
        rl = RlSessions(http, config.inference)
        worker.on_change = rl.on_change = service.lifetime.news.set
        runner = TurnRunner(config, worker, rl, service.metrics, slots)
        routes = PairRoutes(config, store, runner, worker, rl, slots)
        JournalRoutes(store).add_to(service)
        routes.add_to(service)
        store.on_left = routes.forget_all
        service.add_lifespan(lambda: background("worker-probes", worker.run))
        if config.inference is not None:
            service.add_lifespan(lambda: background("inference-probes", rl.watch))
        service.add_lifespan(lambda: background("session-expiry", routes.expire))
        if config.registration is not None:
            lease = RouterLease(config.registration, service, http, options.headers, config.service)
            service.add_lifespan(lambda: background("registration", lease.run))
        try:
            yield service
        finally:
            await runner.close()
