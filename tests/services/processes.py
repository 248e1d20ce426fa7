"""Real service processes on loopback for tests: start, talk, kill. Nothing outlives its ``Processes``."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
_LISTENS = re.compile(r"(?:listens on|share) \S+ port (\d+)")
_START_S = 60.0


@dataclass
class Process:
    """One process under test; ``log`` grows as it writes."""

    popen: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    port: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_log(self, pattern: str, timeout_s: float = _START_S) -> re.Match[str]:
        expression = re.compile(pattern)
        with self.changed:
            found = self.changed.wait_for(
                lambda: next(filter(None, map(expression.search, self.log)), None) or self.popen.poll() is not None,
                timeout_s,
            )
        match = next(filter(None, map(expression.search, self.log)), None)
        assert match, f"never logged {pattern!r} ({found}); it logged:\n" + "".join(self.log)
        return match

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def rss(self) -> int:
        """Resident bytes."""
        pages = int(Path(f"/proc/{self.popen.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def wait(self, timeout_s: float = 30.0) -> int:
        return self.popen.wait(timeout_s)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = None,
        headers: Mapping[str, str | bytes] | None = None,
    ) -> Answer:
        return call(self.port, method, path, body, key=key, headers=headers)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def call(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    *,
    key: str | None = None,
    headers: Mapping[str, str | bytes] | None = None,
) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **(headers or {})}
    if key is not None:
        sent["Authorization"] = f"Bearer {key}"
    with contextlib.closing(connection):
        connection.request(method, path, body=data, headers=sent)
        response = connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


class Stream:
    """A streamed call: events one by one, as they come."""

    def __init__(self, port: int, path: str, body: dict[str, Any], key: str | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._connection.request("POST", path, body=json.dumps({**body, "stream": True}), headers=headers)
        self.response = self._connection.getresponse()
        self.status = self.response.status

    def events(self) -> Iterator[Any]:
        """Decoded events; the last one is the string ``[DONE]`` where the stream ended well."""
        while line := self.response.readline():
            if line.startswith(b"data: "):
                payload = line[6:].strip()
                yield "[DONE]" if payload == b"[DONE]" else json.loads(payload)

    def close(self) -> None:
        self.response.close()
        self._connection.close()


def chat_text(events: list[Any], index: int = 0) -> str:
    pieces = []
    for event in events:
        for choice in event.get("choices", ()) if isinstance(event, dict) else ():
            if choice["index"] == index:
                pieces.append(choice["delta"].get("content") or "")
    return "".join(pieces)


class Processes:
    """Starts the services; ``stop`` kills what is left and checks that nothing else is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[Process] = []
        self.key = "test-key-0123456789"
        self.key_file = folder / "admin.key"
        self.key_file.write_text(self.key, encoding="ascii")
        self.key_file.chmod(0o600)

    def spawn(self, *argv: str, env: dict[str, str] | None = None) -> Process:
        full_env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **(env or {})}
        popen = subprocess.Popen(
            [sys.executable, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=full_env
        )
        process = Process(popen)
        self._running.append(process)
        threading.Thread(target=_pump, args=(process,), name=f"log-{popen.pid}", daemon=True).start()
        return process

    def service(self, module: str, *argv: str, keyed: bool = True, env: dict[str, str] | None = None) -> Process:
        key = ("--admin-key-file", str(self.key_file)) if keyed else ()
        package = module if module.startswith(("agent.", "weight_update")) else f"inference.{module}"
        process = self.spawn("-m", f"areal.services.{package}", "--port", "0", *key, *argv, env=env)
        process.port = int(process.wait_log(_LISTENS.pattern)[1])
        return process

    def engine(self, tokenizer: Path) -> Process:
        process = self.spawn("-P", str(HERE / "scripted_engine.py"), "--tokenizer", str(tokenizer))
        process.port = int(process.wait_log(r"^(\d+)$")[1])
        return process

    def router(self, *argv: str) -> Process:
        return self.service("router", "--health-period", "0.2", *argv)

    def gateway(self, router: Process, *argv: str) -> Process:
        process = self.service("gateway", "--router-url", router.url, *argv)
        wait_ready(process)
        return process

    def data_proxy(self, engine: Process, tokenizer: Path, *argv: str, model: str = "tiny") -> Process:
        flags = ("--model", model, "--engine", "embedded", "--engine-url", engine.url)
        process = self.service("data_proxy", *flags, "--tokenizer-path", str(tokenizer), *argv)
        wait_ready(process)
        return process

    def registration(self, *proxies: Process, model: str, expected: int | None) -> dict[str, Any]:
        workers = [{"worker_id": f"{model}-{number}", "worker_addr": proxy.url} for number, proxy in enumerate(proxies)]
        return {"model": model, "workers": workers, "expected": expected}

    def register(self, router: Process, *proxies: Process, model: str = "tiny", expected: int | None = None) -> None:
        body = self.registration(*proxies, model=model, expected=expected)
        answer = router.call("POST", "/register_model", body, key=self.key)
        assert answer.status == 200, answer.body

    def stop(self) -> None:
        for process in self._running:
            if process.popen.poll() is None:
                process.popen.kill()
            process.popen.wait()


def _pump(process: Process) -> None:
    assert process.popen.stdout is not None
    for line in process.popen.stdout:
        with process.changed:
            process.log.append(line)
            process.changed.notify_all()
    with process.changed:
        process.changed.notify_all()


def wait_ready(process: Process, timeout_s: float = _START_S) -> None:
    wait_until(lambda: process.call("GET", "/ready").status == 200, timeout_s, f"ready: {process.log}")


def wait_until(condition: Any, timeout_s: float = 30.0, what: str = "") -> Any:
    """Poll what has no event to wait for: another process's state."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            if value := condition():
                return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def halted(pid: int) -> Iterator[None]:
    """Hold the process still while the block runs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def script(engine: Process, **what: Any) -> None:
    assert engine.call("POST", "/script", what).status == 200


def release(engine: Process) -> None:
    assert engine.call("POST", "/release").status == 200


def engine_calls(engine: Process, until: str | None = None, count: int = 1) -> list[dict[str, Any]]:
    query = f"?until={until}&count={count}" if until else ""
    calls: list[dict[str, Any]] = engine.call("GET", f"/calls{query}").json()["calls"]
    return calls


TERM = signal.SIGTERM
