"""Runs ``areal`` as a subprocess, so that programs and users start services by the same commands."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from areal.errors import ArealError, NotFound
from areal.installation import module_argv

AREAL = tuple(module_argv("areal.cli.main"))
_NOT_FOUND = 4
_PORTS = range(30_000, 32_768)


def run_areal(*words: str, what: str, hint: str | None = None, absent: bool = False) -> str:
    """Return the output of an areal command. With ``absent``, the exit status "not found" gives "" instead of an error.
    Raises ArealError with the prefix ``what``, its own error, hint (else ``hint``) and exit status."""
    ran = subprocess.run([*AREAL, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if ran.returncode == 0:
        return ran.stdout
    if absent and ran.returncode == _NOT_FOUND:
        return ""
    why = _last_line(ran.stderr, "error: ") or ran.stderr.strip()[-500:]
    failure = ArealError(
        f"{what}, areal {' '.join(words[:2])}: {why}",
        hint=_last_line(ran.stderr, "hint: ") or hint,
        detail="\n".join(line[4:] for line in ran.stderr.splitlines() if line.startswith("  | ")) or None,
    )
    failure.exit_code = ran.returncode
    raise failure


@contextlib.contextmanager
def stop_with_this_process(service: str, log: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Stop an inference service when the block or this process ends, however it ends. A shell waits for the end of a
    pipe that only this process holds open. Its process group is its own: Ctrl-C reaches this process alone."""
    wait = ["sh", "-c", 'cat >/dev/null; exec "$@"', "sh", *AREAL, "inf", "stop", "--service", service, "--yes"]
    with log.open("ab") as out:
        guard = subprocess.Popen(
            wait, stdin=subprocess.PIPE, stdout=out, stderr=out, env=dict(environment), process_group=0
        )
    assert guard.stdin is not None
    try:
        yield
    finally:
        guard.stdin.close()
        guard.wait()


def address_lookup(ref: str) -> Callable[[], str] | None:
    """Return a function that reads the service's address from its record, "" without one. None if ``ref`` is ""."""

    def lookup() -> str:
        found = run_areal("get", ref.lower(), "-o", "json", what=f"the record of {ref}", absent=True)
        return str(json.loads(found)["status"].get("address") or "") if found else ""

    return lookup if ref else None


def _last_line(output: str, mark: str) -> str:
    """Return the text of the last line that begins with ``mark``."""
    lines = [line.strip() for line in output.splitlines()]
    return next((line.removeprefix(mark) for line in reversed(lines) if line.startswith(mark)), "")


def read_key_file(path: str) -> str:
    """Return the API key in a file. Raises NotFound."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise NotFound(f"the key file {path} cannot be read: {error.strerror}") from error


_given: set[int] = set()


def free_port() -> int:
    """Return a port on which nothing listens, and which this process got from here for nothing else. It is not one of
    the kernel's ephemeral ports, which a neighbour's connection may take before its server has it, nor one of those
    that areal gives to components (``runtime.leases``) or Ray to its workers. Raises ArealError."""
    first = int.from_bytes(os.urandom(4), "big")
    for port in (_PORTS[(first + index) % len(_PORTS)] for index in range(len(_PORTS))):
        with contextlib.suppress(OSError), socket.socket() as probe:
            if port not in _given:
                probe.bind(("127.0.0.1", port))
                _given.add(port)
                return port
    raise ArealError(f"none of the ports {_PORTS.start} to {_PORTS.stop - 1} is free")
