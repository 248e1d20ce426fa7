"""A served model that says what a test tells it, for clients whose tools are to be carried out: a random model calls
none by itself. Runs in the tests' own environment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.clients.conftest import MODEL, Served
from tests.services.inference.data_proxy.dialects.talks import TEMPLATE, build_talking_service, prompts
from tests.services.inference.running_service import Service
from tests.services.processes import Processes, script, wait_until
from tests.services.tokenizer_folder import write_tokenizer


@dataclass(frozen=True)
class Scripted(Served):
    service: Service

    def answer(self, replies: dict[str, str], text: str) -> None:
        """Answer a last message that has a key of ``replies`` with its value, any other with ``text``."""
        script(self.service.engine, replies=list(replies.items()), text=text)

    def prompts(self) -> list[str]:
        return prompts(self.service, Path(self.folder))


@contextlib.contextmanager
def scripted_model(folder: Path) -> Iterator[Scripted]:
    tokenizer = write_tokenizer(folder / "tokenizer", template=TEMPLATE)
    processes = Processes(folder)
    try:
        service = build_talking_service(processes, tokenizer, max_model_len=400_000)
        wait_until(lambda: MODEL in service.models(), what="the model is listed")
        yield Scripted(service.gateway.url, service.key, str(tokenizer), service)
    finally:
        processes.stop()
