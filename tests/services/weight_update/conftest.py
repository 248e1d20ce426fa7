"""A trainer's endpoint, the weight-update gateway, and real data proxies over embedded engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.services.http.auth import load_admin_key
from areal.services.weight_update.publisher import TrainerPair, serve_endpoint
from areal.services.weight_update.staging import open_publisher, probe
from areal.training.run_folder import config_files
from areal.wire.bodies import ProbeOfWeights
from tests.services.processes import REPOSITORY, Process, Processes, wait_ready

MODEL = REPOSITORY / "examples" / "reverse_digits" / "model"
PROMPT = [1, 5, 6, 7, 8, 14]  # <bos>1234=


@dataclass
class Side:
    """Everything but the trainer's own process: this test is the trainer."""

    processes: Processes
    gateway: Process
    proxies: list[Process]
    engines: list[Process]
    folder: Path
    stack: ExitStack = field(default_factory=ExitStack)

    def pair(
        self, mode: str, name: str = "actor", inference: dict[str, Any] | None = None, folder: Path | None = None
    ) -> TrainerPair:
        publisher = open_publisher(mode, folder or self.folder / name, config_files(MODEL))
        self.stack.callback(publisher.remove)
        key = load_admin_key(str(self.processes.key_file))
        url = self.stack.enter_context(serve_endpoint({name: publisher}, key))
        workers = inference or {"inference_worker_urls": [proxy.url for proxy in self.proxies]}
        return TrainerPair(name, mode, self.gateway.url, url, workers, publisher, self.processes.key)

    def post(self, path: str, body: Any) -> Any:
        return self.gateway.call("POST", path, body, key=self.processes.key)

    def pairs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.gateway.call("GET", "/pairs", key=self.processes.key).json()["pairs"]
        return found

    def versions(self) -> list[int | None]:
        key = self.processes.key
        return [proxy.call("GET", "/get_version", key=key).json()["version"] for proxy in self.proxies]

    def greedy(self, proxy: Process, prompt: str = "1234") -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 5}
        answer = proxy.call("POST", "/v1/chat/completions", body, key=self.processes.key)
        assert answer.status == 200, answer.body
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text


def embedded_worker(processes: Processes, *argv: str, dtype: str = "float32") -> tuple[Process, Process]:
    """(engine, data proxy) of the example model."""
    engine = processes.service("engines.embedded", "--model-path", str(MODEL), "--dtype", dtype)
    wait_ready(engine)
    flags = ("--model", "m", "--engine", "embedded", "--engine-url", engine.url, "--tokenizer-path", str(MODEL))
    proxy = processes.service("data_proxy", *flags, *argv)
    wait_ready(proxy)
    return engine, proxy


@pytest.fixture
def side(processes: Processes, tmp_path: Path) -> Iterator[Callable[[int], Side]]:
    """``side(2)`` has two workers."""
    with ExitStack() as stack:

        def build(workers: int) -> Side:
            gateway = processes.service("weight_update", "--discovery-file", str(tmp_path / "weight_update.json"))
            started = [
                embedded_worker(processes, "--state-dir", str(tmp_path / f"journal-{number}"))
                for number in range(workers)
            ]
            engines, proxies = [engine for engine, _ in started], [proxy for _, proxy in started]
            return Side(processes, gateway, proxies, engines, tmp_path / "weights", stack)

        yield build


def model(seed: int) -> torch.nn.Module:
    """The example's architecture, with weights that are far from the example's."""
    loaded = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return loaded


def weights(of: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.detach()) for name, tensor in of.state_dict().items()]


@torch.no_grad()
def probe_of(of: torch.nn.Module) -> ProbeOfWeights:
    ids = torch.tensor([PROMPT])
    return probe(torch.log_softmax(of(input_ids=ids).logits[0, -1], -1), ids[0], tolerance=1e-3)


@torch.no_grad()
def logprobs_of(of: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Of each token after those before it, by a plain forward pass; the first entry is of the second token."""
    ids = torch.tensor([tokens])
    logp = torch.log_softmax(of(input_ids=ids).logits[0, :-1], -1)
    return logp.gather(1, ids[0, 1:, None])[:, 0]
