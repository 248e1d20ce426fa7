"""The processes under test: how each kind is started, and how it says that it has nothing left to do."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from areal.client.command import free_port
from areal.http.client import HttpClient
from areal.services.inference.engines import open_engine
from areal.services.inference.engines.base import EngineState, TokenEngine
from tests.services.inference.engines.conformance.models import MAX_LEN

REPOSITORY = Path(__file__).parents[5]
PLUGINS = REPOSITORY / "areal/services/inference/engines"
SGLANG_ON_CPU = REPOSITORY / "tests/engines/sglang_on_cpu"
KINDS = ("embedded", "vllm-standin", "sglang-standin", "vllm", "sglang")
REAL = {"vllm": "AREAL_VLLM_PYTHON", "sglang": "AREAL_SGLANG_PYTHON"}
ON_GPU = bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
SGLANG_ON_CPU_FLAGS = ["--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"]
SGLANG_ON_CPU_FLAGS += ["--mem-fraction-static", "0.3", "--max-total-tokens", "8192", "--sleep-on-idle"]
_PORT = re.compile(r"^(?:.*listens on \S+ port )?(\d+)$", re.MULTILINE)
_START_S = {"vllm": 900.0, "sglang": 900.0}


@dataclass
class EngineProcess:
    kind: str
    popen: subprocess.Popen[bytes]
    log: Path
    port: int | None

    @property
    def client_kind(self) -> str:
        return self.kind.removesuffix("-standin")

    @property
    def lacks(self) -> frozenset[str]:
        """What this engine cannot do on this machine: SGLang's adapters and released memory need a GPU."""
        return frozenset({"adapters", "memory"}) if self.kind == "sglang" and not ON_GPU else frozenset()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self, http: HttpClient) -> TokenEngine:
        return open_engine(self.client_kind, http, self.url, {})

    async def wait_ready(self, http: HttpClient) -> EngineState:
        """Its state once it serves. Fails with its log when it ends first, or takes too long."""
        async with asyncio.timeout(_START_S.get(self.kind, 90.0)):
            while True:
                assert self.popen.poll() is None, self.log.read_text()[-8000:]
                if self.port is None and (found := _PORT.search(self.log.read_text())):
                    self.port = int(found[1])
                if self.port is not None:
                    state = await self.open(http).state()
                    if state.not_ready is None:
                        return state
                await asyncio.sleep(0.05)

    async def unfinished(self, http: HttpClient) -> int:
        """Requests that it still has, by its own word."""
        path = {"embedded": "/stats", "vllm": "/metrics", "sglang": "/v1/loads"}[self.client_kind]
        answer = await http.fetch("GET", self.url, path, timeout_s=10.0)
        if self.client_kind == "vllm":
            text = answer.body.decode()
            return sum(map(int, re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\d+)", text, re.M)))
        reported = answer.object()
        if self.kind == "embedded":
            return int(reported["running"] + reported["waiting"])
        return sum(int(load["num_running_reqs"] + load["num_waiting_reqs"]) for load in reported["loads"])

    def stop(self) -> None:
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(20)
            except subprocess.TimeoutExpired:
                self.popen.kill()
        self.popen.wait()


def start(kind: str, folder: Path, log: Path, adapters: Mapping[str, Path] | None = None, *more: str) -> EngineProcess:
    """``more`` are flags of a stand-in."""
    lora = [f"{name}={path}" for name, path in (adapters or {}).items()]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    port: int | None = None
    if kind == "embedded":
        argv = [sys.executable, "-m", "areal.services.inference.engines.embedded", "--port", "0"]
        argv += ["--model-path", str(folder), "--max-batch-size", "16", *(["--lora", *lora] if lora else [])]
    elif kind in REAL:
        port = free_port()
        argv, changes = (_vllm if kind == "vllm" else _sglang)(folder, port, lora)
        env |= changes
    else:
        module = "tests.services.inference.engines.conformance.standins"
        argv = [sys.executable, "-m", module, kind.removesuffix("-standin"), "--model", str(folder)]
        argv += ["--lora", *lora]
        if kind == "vllm-standin" and "--logprobs-mode" not in more:
            argv += ["--logprobs-mode", "processed_logprobs"]
        argv += more
    with log.open("wb") as out:
        popen = subprocess.Popen(  # their sockets stay where they run
            argv, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=log.parent, start_new_session=True
        )
    return EngineProcess(kind, popen, log, port)


def _vllm(folder: Path, port: int, lora: list[str]) -> tuple[list[str], dict[str, str]]:
    argv = [os.environ["AREAL_VLLM_PYTHON"], "-m", "areal_vllm_server", "--model", str(folder)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--worker-extension-cls", "areal_vllm.Worker"]
    argv += ["--dtype", "float32", "--max-model-len", str(MAX_LEN), "--max-num-seqs", "16", "--enforce-eager"]
    argv += ["--logprobs-mode", "processed_logprobs"]
    if lora:
        argv += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", *lora]
    env = {
        "PYTHONPATH": str(PLUGINS / "vllm_plugin"),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": ".",
    }
    return argv, env


def _sglang(folder: Path, port: int, lora: list[str]) -> tuple[list[str], dict[str, str]]:
    argv = [os.environ["AREAL_SGLANG_PYTHON"], "-m", "areal_sglang", "--model-path", str(folder)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--context-length", str(MAX_LEN)]
    argv += ["--sampling-backend", "pytorch"]
    plugin = PLUGINS / "sglang_plugin"
    if not ON_GPU:
        argv += SGLANG_ON_CPU_FLAGS
        return argv, {"PYTHONPATH": f"{plugin}{os.pathsep}{SGLANG_ON_CPU}", "SGLANG_USE_CPU_ENGINE": "1"}
    argv += ["--enable-memory-saver"]
    if lora:
        argv += ["--enable-lora", "--lora-paths", *lora]
    return argv, {"PYTHONPATH": str(plugin)}
