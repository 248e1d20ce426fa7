"""How a component is started: its common flags, its socket, its exit status. Standard library only, so that a
supervisor that serves nothing itself stays small."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

from areal.errors import ArealError, UsageFault
from areal.resources.bind import is_loopback
from areal.services.web.keys import AdminKey, load_admin_key, refuse_open_bind

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: between fork and exec nothing may be


@dataclass(frozen=True)
class ServeOptions:
    """Where and how a component listens. Port 0 takes a free one."""

    host: str
    port: int
    key: AdminKey | None
    drain_timeout_s: float
    log_level: str
    reuse_port: bool = False

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)


def add_serve_arguments(parser: argparse.ArgumentParser, *, port: int) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=port, help="0 takes a free one")
    parser.add_argument("--admin-key-file", help="file (0600) with the admin key")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--drain-timeout", type=float, default=600.0, help="seconds running requests get at SIGTERM")


def serve_options(args: argparse.Namespace, *, reuse_port: bool = False) -> ServeOptions:
    """Raises UsageFault for a key that cannot be used and for a bind that needs one."""
    key = load_admin_key(args.admin_key_file)
    refuse_open_bind(args.host, key)
    return ServeOptions(args.host, args.port, key, args.drain_timeout, args.log_level, reuse_port)


def bind(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    """A bound TCP socket. Raises ArealError saying what is in the way."""
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
    """A component's exit status: a failure that a user can act on is two lines, not a traceback."""
    try:
        main()
    except ArealError as error:
        sys.stderr.write(f"error: {error.message}\n")
        if error.hint:
            sys.stderr.write(f"hint: {error.hint}\n")
        return error.exit_code
    return 0


def die_with_parent(parent: int) -> None:
    """SIGTERM this process when ``parent`` dies, however it dies; at once when it is dead already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
