"""Flags of a service and of a model, and the manifests that they stand for. Nothing here reads or changes state."""

from __future__ import annotations

import functools
import json
import os
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

import click

from areal.cli.invocation import Invocation
from areal.cli.options import Seconds
from areal.cli.targets import complete_names
from areal.errors import UsageFault
from areal.resources.kinds import API_VERSION, check_name

DEFAULT_SERVICE = "default"
_STRATEGIES = {
    "auto": "auto",
    "round_robin": "round_robin",
    "least_loaded": "least_loaded",
    "least_busy": "least_loaded",
    "prefix": "prefix",
}

Manifest = dict[str, Any]

service_option = click.option(
    "--service",
    metavar="NAME",
    shell_complete=complete_names("InferenceService"),
    help="The service  [default: `areal config set service`, else 'default'].",
)


def service_name(cli: Invocation, given: str | None) -> str:
    return check_name(given or str(cli.default("service") or DEFAULT_SERVICE))


def model_name_option(*, required: bool) -> Callable[[Any], Any]:
    return click.option(
        "--model",
        "--model-name",
        "model",
        metavar="NAME",
        required=required,
        shell_complete=complete_names("Model"),
        help="The model's name.",
    )


class ModelFlags(NamedTuple):
    """How a model is served by engines of ours."""

    backend: str | None
    model_path: str | None
    tokenizer_path: str | None
    engine_args: tuple[str, ...]
    proxy_args: tuple[str, ...]
    served_model_name: str | None
    replicas: int | None
    model_health_timeout: float | None

    @property
    def given(self) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name, value in self._asdict().items() if value not in (None, ())]

    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "backend": self.backend,
            "path": self.model_path,
            "tokenizerPath": self.tokenizer_path,
            "engineArgs": arguments(self.engine_args, "--engine-args"),
            "proxyArgs": arguments(self.proxy_args, "--proxy-args"),
            "servedModelName": self.served_model_name,
            "replicas": self.replicas,
        }
        if self.model_health_timeout is not None:
            spec["probes"] = {"startup": {"deadlineSeconds": self.model_health_timeout}}
        return {key: value for key, value in spec.items() if value not in (None, {})}


_MODEL = (
    click.option("--backend", metavar="BACKEND", help="Engine and allocation: embedded, sglang:d2t2, vllm:d4."),
    click.option("--model-path", metavar="PATH", help="Hugging Face id or folder."),
    click.option("--tokenizer-path", metavar="PATH", help="Hugging Face id or folder  [default: the model's]."),
    click.option("--engine-args", multiple=True, metavar="ARGS", help="'--max-model-len 8192 --enable-x', or JSON."),
    click.option("--proxy-args", multiple=True, metavar="ARGS", help="The same, for the data proxies."),
    click.option("--served-model-name", metavar="NAME", help="What clients send as `model`  [default: --model]."),
    click.option("--replicas", type=click.IntRange(min=0), metavar="N", help="Replicas; overrides d of the backend."),
    click.option(
        "--model-health-timeout", type=Seconds(), metavar="TIME", help="A replica must be ready within  [default: 30m]."
    ),
)


def model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags and hand them to the verb as ``flags``."""

    @functools.wraps(function)
    def gather(*args: Any, **given: Any) -> Any:
        flags = {name: given.pop(name) for name in ModelFlags._fields}
        return function(*args, flags=ModelFlags(**flags), **given)

    decorated: Callable[..., Any] = gather
    for option in reversed(_MODEL):
        decorated = option(decorated)
    return decorated


def arguments(texts: tuple[str, ...], flag: str) -> dict[str, Any]:
    """``--max-model-len 8192 --enable-x``, ``max-model-len=8192`` or a JSON object, as names and typed values."""
    found: dict[str, Any] = {}
    for text in texts:
        found.update(_json_arguments(text, flag) if text.lstrip().startswith("{") else _words(text, flag))
    return found


def _json_arguments(text: str, flag: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageFault(f"{flag}: not JSON: {error}") from None
    assert isinstance(found, dict)
    return found


def _words(text: str, flag: str) -> dict[str, Any]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageFault(f"{flag}: {error}: {text!r}") from None
    found: dict[str, Any] = {}
    at = 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        at += 1
        if not equals and not name.startswith("--"):
            raise UsageFault(f"{flag}: {name!r} is no argument", hint="write '--name value', name=value, or JSON")
        name = name.removeprefix("--")
        if equals:
            found[name] = _typed(value)
        elif at < len(words) and not words[at].startswith("--"):
            found[name] = _typed(words[at])
            at += 1
        else:
            found[name] = True
    return found


def _typed(text: str) -> Any:
    """Numbers, booleans and JSON as what they are; anything else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def service_manifest(
    name: str,
    *,
    host: str | None = None,
    port: int | None = None,
    admin_api_key_file: str | None = None,
    routing_strategy: str | None = None,
    scheduler: str | None = None,
    log_level: str | None = None,
) -> Manifest:
    """Only what was given: defaults are never written down."""
    spec: dict[str, Any] = {}
    gateway = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    if gateway:
        spec["gateway"] = gateway
    if routing_strategy:
        spec["router"] = {"strategy": _STRATEGIES[routing_strategy]}
    if admin_api_key_file:
        path = os.path.abspath(os.path.expanduser(admin_api_key_file))  # noqa: PTH100, PTH111 - symlinks stay
        spec["auth"] = {"adminKeyFrom": {"file": path}}
    if scheduler:
        spec["scheduler"] = {"type": scheduler}
    if log_level:
        spec["logLevel"] = log_level
    return resource("InferenceService", name, spec)


def model_manifest(name: str, service: str, spec: dict[str, Any]) -> Manifest:
    return resource("Model", name, {"service": service, **spec})


def resource(kind: str, name: str, spec: dict[str, Any]) -> Manifest:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": check_name(name)}, "spec": spec}


routing_strategies = tuple(_STRATEGIES)
