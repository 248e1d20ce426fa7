"""A real engine process on loopback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import aiohttp

EXAMPLE = Path(__file__).parents[5] / "examples" / "reverse_digits" / "model"
PROMPT = [1, 5, 6, 7, 8, 14]  # <bos>1234=
_PORT = re.compile(r"listens on \S+ port (\d+)")


class EngineProcess:
    def __init__(self, *arguments: str, model: Path = EXAMPLE, env: dict[str, str] | None = None) -> None:
        argv = [sys.executable, "-m", "areal.services.inference.engines.embedded", "--model-path", str(model)]
        self.popen = subprocess.Popen(
            [*argv, "--port", "0", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        self.stderr: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.expect(_PORT)[1]}"

    def expect(self, pattern: re.Pattern[str] | str) -> re.Match[str]:
        """Wait until a line of stderr matches."""
        found: list[re.Match[str]] = []

        def seen() -> bool:
            found.extend(match for line in self.stderr if (match := re.search(pattern, line)))
            return bool(found) or not self._reader.is_alive()

        with self._changed:
            self._changed.wait_for(seen, timeout=60)
        assert found, "".join(self.stderr)
        return found[0]

    def wait_ready(self) -> EngineProcess:
        self.expect(r"serving: ")
        return self

    def wait_exit(self) -> int:
        code = self.popen.wait(60)
        self._reader.join(10)
        return code

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(60)

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            with self._changed:
                self.stderr.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


class Client:
    """Calls one engine; every call has a deadline."""

    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = aiohttp.ClientSession(url, headers=headers, timeout=aiohttp.ClientTimeout(total=60))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.http.close()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(path) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.http.post(path, json=body if body is not None else {}) as response:
            return response.status, await response.json()

    async def generate(self, prompt: list[int] = PROMPT, **sampling: Any) -> list[dict[str, Any]]:
        status, body = await self.post("/generate", {"input_ids": prompt, "sampling": sampling})
        assert status == 200, body
        choices: list[dict[str, Any]] = body["choices"]
        return choices

    async def wait_stats(self, **expected: Any) -> dict[str, Any]:
        """Ask until the statistics are as expected; the test's own deadline ends a wait in vain."""
        while True:
            _, stats = await self.get("/stats")
            if all(stats[name] == value for name, value in expected.items()):
                found: dict[str, Any] = stats
                return found
