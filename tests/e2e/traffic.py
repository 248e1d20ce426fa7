"""A steady stream of requests from a few threads, each answer checked; what broke is kept, word for word."""

from __future__ import annotations

import http.client
import json
import threading
from types import TracebackType

from tests.e2e.conftest import Box


class Traffic:
    """Requests go on, streamed and not, until the block is left; ``broken`` must then be empty."""

    def __init__(self, box: Box, clients: int = 3) -> None:
        self._box = box
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"client-{number}", daemon=True)
            for number in range(clients)
        ]
        self._progress = threading.Condition()
        self.answered = 0
        self.broken: list[str] = []

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        self.wait_for(5)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=30)

    def wait_for(self, more: int) -> None:
        """Until ``more`` further requests have been answered (or one has broken)."""
        with self._progress:
            goal = self.answered + more
            assert self._progress.wait_for(lambda: self.answered >= goal or bool(self.broken), timeout=60)

    def _run(self, number: int) -> None:
        key, stream = self._box.key, number % 2 == 0
        while not self._stop.is_set():
            try:
                trouble = self._ask(key, stream)
            except (OSError, http.client.HTTPException) as error:
                trouble = repr(error)
            with self._progress:
                if trouble:
                    self.broken.append(trouble)
                else:
                    self.answered += 1
                self._progress.notify_all()

    def _ask(self, key: str, stream: bool) -> str:
        body = {"model": "reverse", "messages": [{"role": "user", "content": "1234"}], "stream": stream}
        connection = http.client.HTTPConnection("127.0.0.1", self._box.port, timeout=60)
        try:
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            return f"{answer.status} {text}"
        whole = text.rstrip().endswith("data: [DONE]") if stream else "choices" in json.loads(text)
        return "" if whole and '"error"' not in text else f"not whole: {text[-300:]}"
