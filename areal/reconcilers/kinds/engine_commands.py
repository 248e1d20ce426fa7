"""The servers of vLLM and SGLang: the module that starts each, the flags that areal sets, and the environment.

Our own modules (``areal/services/inference/engines/*_plugin``) start them; these adapt to the command line of the
installed version. They are found by PYTHONPATH, since the engine's environment may not have areal installed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import areal
from areal.runtime.environment import absolute_paths


class EngineCommand(NamedTuple):
    """The module, its flag for the whole help, the flags that areal sets, its settings and its environment.

    ``switches``: the flags without a form ``--no-``, which are off unless given; None: nearly all."""

    module: str
    help: str
    model: str
    tensor: str
    pipeline: str
    adapters: str
    settings: tuple[str, ...]
    env: Mapping[str, str]
    switches: frozenset[str] | None


_VLLM_SWITCHES = frozenset(
    ("aggregate-engine-logging", "data-parallel-multi-port-external-lb", "disable-log-stats", "grpc", "headless")
)

# vLLM has its pause, version, weight and adapter routes only in development mode; it then listens on loopback or
# requires a key. SGLang's ``/health`` would sample a token, and would not answer while the engine is paused.
ENGINE_COMMANDS = {
    "vllm": EngineCommand(
        "areal_vllm_server",
        "--help=all",
        "--model",
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
        "--lora-modules",
        # log-probabilities are those of the request's temperature
        ("--worker-extension-cls", "areal_vllm.Worker", "--logprobs-mode", "processed_logprobs"),
        # its sockets outlive it: they are in the run's folder and are deleted with it
        {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_RPC_BASE_PATH": "."},
        _VLLM_SWITCHES,
    ),
    "sglang": EngineCommand(
        "areal_sglang",
        "--help",
        "--model-path",
        "--tp-size",
        "--pp-size",
        "--lora-paths",
        (),
        {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"},
        None,
    ),
}


def engine_env(engine: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an engine's process beyond those it inherits. ``given``: the manifest's."""
    plugin = str(Path(areal.__file__).parent / "services" / "inference" / "engines" / f"{engine}_plugin")
    path = given.get("PYTHONPATH", absolute_paths(os.environ.get("PYTHONPATH", "")))
    return {
        **ENGINE_COMMANDS[engine].env,
        **given,
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": f"{plugin}{os.pathsep}{path}" if path else plugin,
    }
