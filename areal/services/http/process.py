"""The start of a service process: its configuration, socket and exit status. Imports only the standard library, so that
a supervisor, which serves nothing itself, stays small."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from areal.dataclasses import dataclass, fields
from areal.errors import ArealError, FieldError, UsageFault
from areal.files import parse_json, replace_file
from areal.resources.addresses import is_loopback
from areal.services.http.auth import AdminKey, load_admin_key, refuse_open_bind
from areal.wire.fields import hints_of, read_fields
from areal.wire.processes import ServeConfig

C = TypeVar("C", bound=ServeConfig)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here, since nothing may be loaded between fork and exec


@dataclass(frozen=True)
class ServeOptions:
    """The address of a component. Port 0 takes a free one."""

    host: str
    port: int
    key: AdminKey | None
    drain_timeout_s: float
    log_level: str
    reuse_port: bool = False

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def headers(self) -> dict[str, str]:
        """The headers for calls to other components of the same service."""
        return self.key.bearer() if self.key is not None else {}


def read_config(cls: type[C], prog: str, argv: Sequence[str] | None = None) -> C:
    """Read the JSON object in the file that ``--config`` names; flags override its fields. Raises UsageFault naming the
    field."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--config", metavar="FILE", help="JSON object of the fields that the flags below are named for")
    for each in fields(cls):
        flag, about = "--" + each.name.replace("_", "-"), each.metadata["help"] or argparse.SUPPRESS
        kind = hints_of(cls)[each.name]  # type: ignore[arg-type]  # a class is hashable
        parser.add_argument(flag, default=argparse.SUPPRESS, help=about, **_flag_options(kind))
    given = vars(parser.parse_args(argv))
    path = given.pop("config")
    try:
        written = {} if path is None else parse_json(Path(path).read_text())
        return read_fields(cls, {**written, **given} if isinstance(written, dict) else written)
    except OSError as error:
        raise UsageFault(f"cannot read the configuration {path}: {error.strerror}") from error
    except FieldError as error:
        if path is None or error.field in given:
            raise UsageFault(f"--{error.field.replace('_', '-')} {error.problem}") from error
        raise UsageFault(f"the configuration {path}: {error}") from error
    except ValueError as error:
        raise UsageFault(f"the configuration {path} is not valid JSON: {error}") from error


def save_settings(settings: Mapping[str, object]) -> None:
    """Write changed settings into the configuration file, if there is one, for the next start of this process. Raises
    OSError."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", type=Path)
    path: Path | None = parser.parse_known_args()[0].config
    if path is None:
        return
    replace_file(path, json.dumps({**json.loads(path.read_text()), **settings}).encode(), mode=0o600)


def _flag_options(kind: Any) -> dict[str, Any]:
    """Return argparse's options for the flag of a field of this type. ``read_fields`` checks the values."""
    if type(None) in get_args(kind):
        kind = next(each for each in get_args(kind) if each is not type(None))
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is tuple and get_args(kind)[0] is str:
        return {"nargs": "+"}
    return {"type": kind if kind in (int, float, str) else json.loads}


def serve_options(config: ServeConfig, *, reuse_port: bool = False) -> ServeOptions:
    """Return the options of a service. Raises UsageFault for an unusable key, and for an address that requires a
    key."""
    key = load_admin_key(config.admin_key_file)
    refuse_open_bind(config.host, key)
    return ServeOptions(config.host, config.port, key, config.drain_timeout, config.log_level, reuse_port)


def bind(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    """Return a bound TCP socket. Raises ArealError with the reason."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UsageFault(f"cannot listen on {host}: {error.strerror}") from error
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ArealError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint=f"find the holder with: ss -ltnp 'sport = :{port}'",
        ) from error
    sock.setblocking(False)
    return sock


def exit_on_failure(main: Callable[[], None]) -> int:
    """Run ``main`` and return the exit status. A failure that a user can act on is printed as two lines, not a
    traceback."""
    try:
        main()
    except ArealError as error:
        sys.stderr.write(f"error: {error.message}\n")
        if error.hint:
            sys.stderr.write(f"hint: {error.hint}\n")
        return error.exit_code
    return 0


def die_with_parent(parent: int) -> None:
    """Make the kernel send SIGTERM to this process when ``parent`` dies, for whatever reason; at once if it is already
    dead."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def drain_limit_s(configured: float) -> float:
    """Return the seconds that running requests have to finish: from the stop order in the run's folder, since the
    setting may have changed after this process started, otherwise ``configured``."""
    try:
        return float(parse_json(Path(os.environ["AREAL_RUN_DIR"], "stop.json").read_text())["grace_s"])
    except (KeyError, OSError, ValueError, TypeError):
        return configured


_GC_THRESHOLDS = (50_000, 20, 50)  # the first in objects: some tens of megabytes at most


def collect_rarely() -> None:
    """Make the garbage collector run rarely. Call it once all long-lived objects exist. Reference counting frees nearly
    all objects of a request; at the default thresholds the collector takes a tenth of a short request's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
