"""AReaL's import paths that have no file here. ``ALIASES`` maps each of them to the module that replaces it. Importing
a path in ``UNSUPPORTED`` raises an ImportError that names the alternative. Paths in the documentation have files, so
that type checkers and editors find them.

A key ``package.module`` of ``UNSUPPORTED`` stands for everything below it, ``package.module:name`` for one name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from areal.errors import UsageFault
from areal.lazy import lazy

if TYPE_CHECKING:
    from areal.api.config.rollout import InferenceEngineConfig

_CONTROLLER = dict.fromkeys(("AgentController", "RolloutController", "RolloutControllerV2"), "areal.client")
_AGENT_TYPES = dict.fromkeys(
    ("AgentRequest", "AgentResponse", "AgentRunnable", "EventEmitter", "StreamResponse"), "areal.api.agent"
)
_TRAINERS = dict.fromkeys(("DPOTrainer", "PPOTrainer", "RWTrainer", "SFTTrainer"), "areal")
ALIASES: dict[str, dict[str, str]] = {
    "areal.core": {"workflow_context": "areal.api.workflow_context"},
    "areal.engine.sglang_remote": {"RemoteSGLangEngine": "areal.compat"},
    "areal.experimental.agent_service.controller": _CONTROLLER,
    "areal.experimental.agent_service.types": _AGENT_TYPES,
    "areal.experimental.inference_service.controller.controller": _CONTROLLER,
    "areal.experimental.trainer": _TRAINERS,
    "areal.experimental.trainer.rl": _TRAINERS,
    "areal.experimental.openai.types": {"InteractionWithTokenLogpReward": "areal.rollout.openai_client"},
    "areal.utils.dynamic_import": {"import_from_string": "areal.loading"},
    "areal.trainer": _TRAINERS,
    "areal.v2.agent_service.controller": _CONTROLLER,
    "areal.v2.agent_service.types": _AGENT_TYPES,
    "areal.v2.inference_service.controller.controller": _CONTROLLER,
}
"""The home of each name of a module."""

_SERVICE = (
    "an InferenceService runs the engines (areal apply, areal inf run), and areal.client.RolloutController samples "
    "from it; a driver whose configuration lays out an engine brings its own"
)
_SCHEDULER = (
    "processes are started by areal apply and areal train run, not by the driver; RolloutController needs no scheduler"
)
_LAUNCHER = "areal train run --driver DRIVER --config FILE scheduler.type={}"
_AGENT_CLIENT = (
    "a class with async run(data, base_url=, api_key=, http_client=, **extra) is a workflow, and gets the base URL and "
    "key of a recorded session; areal.experimental.openai.ArealOpenAI is the client for a workflow of its own"
)
_SANDBOX = "there are no sandboxes: call one from the reward function, which runs in a process of its own"

UNSUPPORTED = {
    "areal.engine": _SERVICE,
    "areal.infra:LocalScheduler": _SCHEDULER,
    "areal.infra:RayScheduler": _SCHEDULER,
    "areal.infra:SlurmScheduler": _SCHEDULER,
    "areal.infra.scheduler": _SCHEDULER,
    "areal.infra.launcher.ray": _LAUNCHER.format("ray"),
    "areal.infra.launcher.slurm": _LAUNCHER.format("slurm"),
    "areal.infra.async_task_runner": "areal.client.RolloutController runs episodes: submit, wait, rollout_batch",
    "areal.infra.rpc.rpc_server": _SCHEDULER,
    "areal.experimental.inference_service.guard": _SCHEDULER,
    "areal.infra.rpc": "trajectories are plain tensors in the driver's process: leave RTensor.localize out",
    "areal.infra.sandbox": _SANDBOX,
    "areal.launcher": "python -m areal.infra.launcher.local DRIVER --config FILE, or areal train run --driver DRIVER",
    "areal.experimental.camel": "CAMEL's own OpenAICompatibleModel with the base URL and key of the session: "
    + _AGENT_CLIENT,
    "areal.experimental.openai:OpenAIProxyClient": _AGENT_CLIENT,
    "areal.experimental.openai:OpenAIProxyWorkflow": _AGENT_CLIENT,
    "areal.experimental.openai.proxy": _AGENT_CLIENT,
    "areal.utils.proxy_utils": _AGENT_CLIENT,
    "areal.reward.math_parser": "areal.reward.gsm8k:gsm8k_reward_fn scores an answer",
    "areal.scheduler": _SCHEDULER,
    "areal.experimental.openai.cache": "interactions are recorded by the inference service; "
    "areal.experimental.openai.ArealOpenAI.export_interactions returns those of an episode",
    "areal.experimental.models": "models are those of transformers, trained by FSDP2 (actor.backend: fsdp:dN)",
    "areal.tests": "tests of this project are in its repository, not in the package",
    "areal.tools": "seconds of a step's parts are in metrics.jsonl (areal train metrics --all); torch.profiler traces "
    "kernels",
    "areal.utils.network": "socket.socket().bind(('127.0.0.1', 0)) finds a free port",
    "areal.utils.dataloader": "trainers batch their data sets themselves; RolloutController.rollout_batch takes a list "
    "of rows; trainer.type null, or areal inf collect, evaluates",
    "areal.utils.environ": "a driver is the same on every rank: Trainer.ranks.is_first tells the first one",
    "areal.utils.proc": "areal's own processes are ended by areal train stop and areal inf stop",
}


class AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of ``ALIASES`` and their parent packages, and refuses those of ``UNSUPPORTED``."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name in ALIASES or any(each.startswith(f"{name}.") for each in ALIASES):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        refuse(name)
        return None

    def exec_module(self, module: ModuleType) -> None:
        homes = ALIASES.get(module.__name__, {})
        module.__dict__["__all__"] = list(homes)
        found = lazy(module.__name__, homes)

        def find(name: str) -> object:
            if name not in homes and not name.startswith("__"):
                refuse(module.__name__, name)
            return found(name)

        module.__dict__["__getattr__"] = find


FINDER = AliasFinder()


def refuse(module: str, name: str | None = None) -> None:
    """Raise ImportError for a name in the table."""
    parts = module.split(".")
    keys = [".".join(parts[:length]) for length in range(len(parts), 1, -1)]
    keys[:0] = [f"{module}:{name}"] if name is not None else []
    instead = next((UNSUPPORTED[key] for key in keys if key in UNSUPPORTED), None)
    if instead is not None:
        what = f"{module}.{name}" if name is not None else module
        raise ImportError(f"{what} of AReaL is not provided: {instead}", name=what)


def attribute(module: str, name: str) -> object:
    """Return a module's ``__getattr__``. Raises ImportError for a name in the table, else AttributeError."""
    refuse(module, name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


class RemoteEngineController:
    """A second server for a driver, such as a judge, at ``proxy_gateway_addr``: an InferenceService, or any server with
    OpenAI's API. No server is started or stopped."""

    def __init__(self, address: str) -> None:
        self.proxy_gateway_addr = address

    def initialize(self, *_: Any, **__: Any) -> None:
        """Do nothing: the server already runs. AReaL's method starts it."""

    start_proxy = start_proxy_gateway = destroy = initialize


class RemoteSGLangEngine:
    """The constructor raises UsageFault, because an InferenceService runs the engines."""

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageFault(
            "RemoteSGLangEngine is not supported: an InferenceService runs the engines",
            hint="areal.client.RolloutController samples from it",
        )

    @classmethod
    def as_controller(
        cls: type[Self], config: InferenceEngineConfig, scheduler: object = None
    ) -> RemoteEngineController:
        """Return a client of the configured server. Raises UsageFault if no address is given."""
        if not config.gateway_addr:
            raise UsageFault(
                f"the server of {config.backend or 'a second engine'} is not given: a driver starts only its own",
                hint="gateway_addr=http://HOST:PORT in its section, of a server that is running",
            )
        return RemoteEngineController(config.gateway_addr)
