"""Reading from a gateway elsewhere instead of from this machine's state.

Which one: ``--gateway``, else ``AREAL_GATEWAY``, else the context (``--context``, else ``currentContext`` of
config.yaml; ``local`` is this home). With which key: ``--api-key-file``, else ``AREAL_API_KEY``, else the context's
``apiKeyFile``. A gateway serves models, workers and their health; it knows nothing of objects, logs or events.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from areal.errors import ArealError, Conflict, NotFound, UsageFault

if TYPE_CHECKING:
    from areal.cli.invocation import Invocation

LOCAL = "local"
_DEADLINE_S = 10.0


class KeyRefused(ArealError):
    """The gateway is there, and does not let this key ask."""


class Gateway(NamedTuple):
    url: str
    key: str | None
    timeout_s: float = _DEADLINE_S

    def get(self, path: str) -> Any:
        """GET a JSON document. Raises ArealError saying what the gateway answered, or why it could not."""
        return self.checked("GET", path, *self.ask("GET", path))

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and document, whatever they are. Raises ArealError without an answer."""
        from areal.client.admin import AdminClient

        try:
            return AdminClient(self.url, self.key or "", timeout_s=self.timeout_s).call(method, path, body)
        except OSError as error:
            raise ArealError(
                f"cannot reach the gateway {self.url}: {error or type(error).__name__}",
                hint="check --gateway (or AREAL_GATEWAY, or `areal config get-contexts`)",
            ) from error

    def checked(self, method: str, path: str, status: int, document: Any) -> Any:
        """The document of a 200. Raises KeyRefused, or ArealError for any other answer."""
        if status in (401, 403):
            raise KeyRefused(
                f"the gateway {self.url} refuses the key ({method} {path} answers {status})",
                hint="give its key with --api-key-file or AREAL_API_KEY",
            )
        if status != 200:
            raise ArealError(f"the gateway {self.url} answers {status} to {method} {path}", detail=_reason(document))
        return document


def gateway(cli: Invocation) -> Gateway | None:
    """The gateway to ask, or None: this machine's own state."""
    url = cli.gateway_flag or (None if cli.context_flag else os.environ.get("AREAL_GATEWAY"))
    context = {} if url else _context(cli)
    url = url or context.get("gateway")
    if not url:
        return None
    key = _key(cli, context)
    cli.tell(f"asking {url}" + ("" if key else ", without a key"))
    return Gateway(checked_url(str(url)), key, min(cli.timeout_s or _DEADLINE_S, _DEADLINE_S))


def not_remote(cli: Invocation, verb: str) -> None:
    """For verbs whose data stays on the machine that runs the processes."""
    chosen = gateway(cli)
    if chosen is not None:
        raise UsageFault(
            f"`areal {verb}` reads files of the machine that runs the processes; {chosen.url} does not serve them",
            hint=f"run `areal {verb}` there, or here with --context local",
        )


def refuse_remote_context(cli: Invocation) -> None:
    """A mutating verb acts on this machine: with a remote context in force that is not what was meant."""
    context = _context(cli)
    if context.get("gateway"):
        name = cli.context_flag or cli.config.get("currentContext")
        raise Conflict(
            f"the context {name!r} is a remote gateway, and this command changes the machine that it runs on",
            hint="add --context local to act here, or run it on that machine",
        )


def checked_url(url: str) -> str:
    from urllib.parse import urlsplit

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
    name = cli.context_flag or cli.config.get("currentContext") or LOCAL
    if name == LOCAL:
        return {}
    contexts = cli.config.get("contexts") or {}
    if name not in contexts:
        from areal.resources.suggest import did_you_mean

        raise NotFound(
            f'no context "{name}" in {cli.home.config}{did_you_mean(str(name), [*contexts, LOCAL])}',
            hint=f"areal config set-context {name} --gateway URL",
        )
    found: Mapping[str, Any] = contexts[name]
    return found


def _key(cli: Invocation, context: Mapping[str, Any]) -> str | None:
    file = cli.key_file_flag
    if file is None and os.environ.get("AREAL_API_KEY"):
        return os.environ["AREAL_API_KEY"].strip()
    file = file or context.get("apiKeyFile")
    return read_key(str(file)) if file else None


def read_key(path: str) -> str:
    """The key in a file, without surrounding space. Raises ArealError naming the file."""
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:  # noqa: PTH111 - stays light
            key = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ArealError(f"cannot read the key file {path}: {error}") from error
    if not key:
        raise ArealError(f"the key file {path} is empty")
    return key


def _reason(document: Any) -> str | None:
    if isinstance(document, dict):
        error = document.get("error", document)
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return None
