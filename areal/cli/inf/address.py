"""Whom an ``inf`` verb talks to: the gateway that was named, else that of this home's service."""

from __future__ import annotations

from areal.cli.inf.flags import service_name
from areal.cli.invocation import Invocation
from areal.cli.remote import Gateway, gateway, read_key
from areal.cli.targets import stored
from areal.errors import ArealError
from areal.resources.kinds import Ref, name_problem, served_name


def gateway_of(cli: Invocation, service: str | None) -> Gateway:
    """Raises NotFound for a service that is not there, ArealError for one that does not run or has no key here."""
    chosen = gateway(cli)
    if chosen is not None:
        return chosen
    name = service_name(cli, service)
    return Gateway(_address(cli, name), _local_key(cli, name))


def model_at(cli: Invocation, service: str | None, model: str | None) -> str | None:
    """What the gateway calls the model that was named: by its object's name here, or as clients call it."""
    from areal.state.objects import ObjectStore

    if model is None or gateway(cli) is not None or name_problem(model) is not None:
        return model
    found = ObjectStore(cli.home).get(Ref("Model", model))
    if found is None or found.spec.get("service", "default") != service_name(cli, service):
        return model
    return served_name(found.name, found.spec)


def _address(cli: Invocation, service: str) -> str:
    from areal.cli import view
    from areal.reconcilers.status import gateway_address

    found = stored(cli.home, Ref("InferenceService", service))
    address = gateway_address(str(found.ref), view.read_runs(cli.home).values())
    if not address:
        raise ArealError(f"{found.ref} does not run", hint=f"start it: areal inf run {service} -d")
    return address


def _local_key(cli: Invocation, service: str) -> str:
    from areal.cli.keys import service_key

    return read_key(cli.key_file_flag) if cli.key_file_flag else service_key(cli.home, service)
