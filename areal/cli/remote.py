"""Selects the gateway that a command uses: a remote gateway, or that of a service of this home.

The remote gateway is ``--gateway``, else that of the context ``--context``, else ``AREAL_GATEWAY``, else that of
``currentContext`` in config.yaml; the context ``local`` is this home. Its key is in ``--api-key-file``, else in
``AREAL_API_KEY``, else in the context's ``apiKeyFile``. A gateway reports models, workers and their health, but has no
objects, logs or events.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import click

from areal.cli.objects import service_name, stored
from areal.cli.options import LOCAL, Invocation, read_options
from areal.client.gateway import GatewayClient
from areal.errors import ArealError, Conflict, NotFound, UsageFault, did_you_mean
from areal.reconcilers.home_view import HomeView, service_of
from areal.resources.kinds import INFERENCE_SERVICE, KINDS, MODEL, Ref, name_problem, served_name

_DEADLINE_S = 10.0


def gateway(cli: Invocation) -> GatewayClient | None:
    """Return the client of the remote gateway, or None if the command uses the state of this machine."""
    url = cli.gateway_flag or (None if cli.context_flag else os.environ.get("AREAL_GATEWAY"))
    context = {} if url else _context(cli)
    url = url or context.get("gateway")
    if not url:
        return None
    file, given = cli.key_file_flag, os.environ.get("AREAL_API_KEY")
    if file is None and given:
        key: str | None = given.strip()
    else:
        from areal.state.home import read_key

        file = file or context.get("apiKeyFile")
        key = read_key(str(file)) if file else None
    cli.detail(f"asking {url}" + ("" if key else ", without a key"))
    return GatewayClient(checked_url(str(url)), key, min(cli.timeout_s or _DEADLINE_S, _DEADLINE_S))


def local_options(verb: Any) -> Any:
    """Add the options of a command that reads files of the machine that runs the processes, and refuse a remote
    gateway. Must be the last decorator."""

    @functools.wraps(verb)
    def local(cli: Invocation, /, *args: Any, **given: Any) -> Any:
        chosen = gateway(cli)
        if chosen is not None:
            command = click.get_current_context().command_path
            raise UsageFault(
                f"`{command}` reads files of the machine that runs the processes; {chosen.url} does not serve them",
                hint=f"run `{command}` there, or here with --context local",
            )
        return verb(cli, *args, **given)

    return read_options()(local)


def refuse_remote_context(cli: Invocation) -> None:
    """Raise Conflict if a remote context is selected. For mutating commands, which act on this machine."""
    if _context(cli).get("gateway"):
        raise Conflict(
            f"the context {cli.context!r} is a remote gateway, and this command changes the machine that it runs on",
            hint="add --context local to act here, or run it on that machine",
        )


def checked_url(url: str) -> str:
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise UsageFault(f'"{url}" is not the URL of a gateway', hint="for example http://127.0.0.1:8080")
    return text.rstrip("/")


def _context(cli: Invocation) -> Mapping[str, Any]:
    name = cli.context
    if name == LOCAL:
        return {}
    if name not in cli.contexts:
        raise NotFound(
            f'no context "{name}" in {cli.home.config}{did_you_mean(name, [*cli.contexts, LOCAL])}',
            hint=f"areal config set-context {name} --gateway URL",
        )
    return cli.contexts[name]


def namespace(kind: str) -> str:
    """Return the command group of a kind: ``inf``, ``agent``."""
    return KINDS[kind].short[0]


def gateway_of(cli: Invocation, service: str | None, kind: str = INFERENCE_SERVICE) -> GatewayClient:
    """Return the client of the remote gateway, else of a service of this home. Raises NotFound for an unknown service,
    ArealError for a service that does not run or has no key here."""
    from areal.reconcilers.usage import service_key
    from areal.state.home import read_key

    chosen = gateway(cli)
    if chosen is not None:
        return chosen
    found = stored(cli.home, Ref(kind, service_name(cli, service, kind)))
    ref = found.ref
    address = HomeView(cli.home).address(ref)
    if not address and found.spec.get("suspend") and not found.awaits:
        raise ArealError(f"{ref} is suspended", hint=f"areal resume {ref}")
    if not address:
        raise ArealError(f"{ref} does not run", hint=f"start it: areal {namespace(kind)} run --service {ref.name} -d")
    key = read_key(cli.key_file_flag) if cli.key_file_flag else service_key(cli.home, ref.name, kind)
    return GatewayClient(address, key)


def model_at(cli: Invocation, service: str | None, model: str | None) -> str | None:
    """Return the served name of a model, given its object name or its served name."""
    from areal.state.objects import ObjectStore

    if model is None or gateway(cli) is not None or name_problem(model) is not None:
        return model
    found = ObjectStore(cli.home).get(Ref(MODEL, model))
    if found is None or service_of(found) != service_name(cli, service):
        return model
    return served_name(found.name, found.spec)
