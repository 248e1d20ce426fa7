"""The command tree as one static table: name -> where the code is, and its one line of help.

``areal --help`` and completion read only this module; the code behind a name is imported when the name is used.
Names are frozen: scripts depend on them (``tests/cli/tree.json``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Leaf(NamedTuple):
    target: str  # "module:attribute", the click command
    help: str
    section: str = "Commands"


class Branch(NamedTuple):
    help: str
    table: Mapping[str, Leaf | Branch]
    section: str = "Commands"
    text: str = ""  # the group's help page, below its one line


_CONVERGE = "Converge"
_LOOK = "Look"
_MANIFESTS = "Manifests (no state, no GPU, no network)"
_UPKEEP = "Upkeep"
_SHORTCUTS = "Shortcuts: the same resources and the same reconciler"


def _inf(verb: str, text: str, module: str) -> Leaf:
    return Leaf(f"areal.cli.inf.{module}:{verb}", text)


INF_SESSIONS: dict[str, Leaf | Branch] = {
    "list": _inf("sessions_list", "List sessions: state, turns, rewards, age.", "sessions"),
    "show": _inf("sessions_show", "One session's trajectories and interactions.", "sessions"),
}

TRAJECTORIES: dict[str, Leaf | Branch] = {
    "show": _inf("show", "Show tokens with logprobs, versions and rewards.", "trajectories"),
}

INF: dict[str, Leaf | Branch] = {
    "run": _inf("run", "Start an inference service, and a model with --model.", "run"),
    "stop": _inf("stop", "Stop a service and its models.", "lifecycle"),
    "status": _inf("status", "Health of one service: components, models, routes.", "status"),
    "ps": _inf("ps", "List inference services.", "lifecycle"),
    "register": _inf("register", "Add a model to a service: own replicas, or an external URL.", "models"),
    "deregister": _inf("deregister", "Take a model out of a service and stop its replicas.", "models"),
    "models": _inf("models", "List a service's models.", "models"),
    "scaleup": _inf("scaleup", "Add replicas of a model.", "models"),
    "scaledown": _inf("scaledown", "Drain and remove replicas of a model.", "models"),
    "chat": _inf("chat", "Talk to a model: one shot or a REPL.", "chat"),
    "collect": _inf("collect", "Collect a batch of rollout trajectories.", "collect"),
    "sessions": Branch("List and show RL sessions.", INF_SESSIONS),
    "trajectories": Branch("Look at recorded trajectories.", TRAJECTORIES),
    "logs": _inf("logs", "Logs of a service's processes.", "lifecycle"),
}


def _agent(verb: str, text: str, attribute: str = "") -> Leaf:
    return Leaf(f"areal.cli.agent:{attribute or verb}", text)


SESSIONS: dict[str, Leaf | Branch] = {
    "list": _agent("list", "List sessions.", "sessions_list"),
    "show": _agent("show", "One session's history.", "sessions_show"),
    "new": _agent("new", "Open a session.", "sessions_new"),
    "switch": _agent("switch", "Make a session the current one.", "sessions_switch"),
    "close": _agent("close", "Close a session.", "sessions_close"),
}

AGENT: dict[str, Leaf | Branch] = {
    "run": _agent("run", "Start an agent service."),
    "stop": _agent("stop", "Stop an agent service."),
    "status": _agent("status", "Health of one agent service."),
    "ps": _agent("ps", "List agent services."),
    "logs": _agent("logs", "Logs of an agent service's processes."),
    "scaleup": _agent("scaleup", "Add worker and data-proxy pairs."),
    "scaledown": _agent("scaledown", "Drain and remove pairs."),
    "chat": _agent("chat", "Talk to the agent: one shot or a REPL."),
    "sessions": Branch("List, show, open, switch and close sessions.", SESSIONS),
    "reward": _agent("reward", "Give a reward to a session's interaction."),
    "export": _agent("export", "Export a session's trajectory."),
}


def _train(verb: str, text: str) -> Leaf:
    return Leaf(f"areal.cli.train:{verb}", text)


TRAIN: dict[str, Leaf | Branch] = {
    "run": _train("run", "Run a driver in the foreground; its exit code is ours."),
    "start": _train("start", "Run a driver detached; prints the job's name."),
    "stop": _train("stop", "Stop a job by name."),
    "ps": _train("ps", "List jobs."),
    "status": _train("status", "One job: phase, step, reward, throughput, staleness."),
    "wait": _train("wait", "Wait until a job has ended; shows its step and ETA."),
    "logs": _train("logs", "A job's output."),
    "metrics": _train("metrics", "Curves of jobs in the terminal or as a picture, compared."),
    "trajectories": Leaf(
        "areal.cli.inf.trajectories:of_job", "Show what a job trained on: tokens, rewards, advantages."
    ),
}


def _weights(verb: str, text: str, attribute: str = "") -> Leaf:
    return Leaf(f"areal.cli.weight_update:{attribute or verb}", text)


WEIGHT_UPDATE: dict[str, Leaf | Branch] = {
    "status": _weights("status", "Health of a weight-update gateway."),
    "pairs": _weights("pairs", "Train-inference pairs, their versions and last update."),
    "ps": _weights("ps", "List weight-update gateways."),
    "logs": _weights("logs", "Logs of a weight-update gateway."),
    "force-sync": _weights("force-sync", "Push the training side's weights now.", "force_sync"),
    "release": _weights("release", "Wait no more for weights of a trainer that is gone."),
}


def _config(verb: str, text: str) -> Leaf:
    return Leaf(f"areal.cli.verbs.config:{'set_' if verb == 'set' else verb.replace('-', '_')}", text)


CONFIG: dict[str, Leaf | Branch] = {
    "view": _config("view", "Print the configuration."),
    "get-contexts": _config("get-contexts", "List contexts."),
    "current-context": _config("current-context", "Print the current context."),
    "use-context": _config("use-context", "Make a context the current one ('local' is this home)."),
    "set-context": _config("set-context", "Add or change a context: a remote gateway."),
    "delete-context": _config("delete-context", "Remove a context."),
    "set": _config("set", "Set a default, e.g. `areal config set output wide`."),
    "unset": _config("unset", "Remove a default."),
    "path": _config("path", "Print where the configuration file is."),
}


def _models(verb: str, text: str) -> Leaf:
    return Leaf(f"areal.cli.verbs.models:{verb}", text)


MODELS: dict[str, Leaf | Branch] = {
    "pull": _models("pull", "Download a model."),
    "ls": _models("ls", "List downloaded models."),
    "rm": _models("rm", "Remove a downloaded model."),
}


def _verb(verb: str, text: str, section: str, module: str = "") -> Leaf:
    return Leaf(f"areal.cli.verbs.{module or verb}:{verb}", text, section)


ROOT: dict[str, Leaf | Branch] = {
    "apply": _verb("apply", "Converge to manifests.", _CONVERGE),
    "diff": _verb("diff", "Print the plan that apply would run.", _CONVERGE, "apply"),
    "delete": _verb("delete", "Stop and forget objects.", _CONVERGE),
    "scale": _verb("scale", "Set the number of replicas.", _CONVERGE, "operate"),
    "restart": _verb("restart", "Restart an object's processes, rolling where it can.", _CONVERGE, "operate"),
    "suspend": _verb("suspend", "Stop an object's processes and keep the object.", _CONVERGE, "operate"),
    "resume": _verb("resume", "Start a suspended object again.", _CONVERGE, "operate"),
    "rollback": _verb("rollback", "Go back to an earlier revision.", _CONVERGE, "revisions"),
    "wait": _verb("wait", "Wait for a condition.", _CONVERGE),
    "get": _verb("get", "List kinds, objects or processes.", _LOOK),
    "describe": _verb("describe", "Everything about one object.", _LOOK),
    "history": _verb("history", "An object's accepted revisions.", _LOOK, "revisions"),
    "logs": _verb("logs", "Logs of an object's processes, merged or one.", _LOOK),
    "events": _verb("events", "What happened, newest last.", _LOOK),
    "top": _verb("top", "CPU, memory, GPU and tokens/s of each process.", _LOOK),
    "init": _verb("init", "Write a commented manifest of a kind.", _MANIFESTS, "manifests"),
    "validate": _verb("validate", "Check manifests; every error with its position.", _MANIFESTS, "manifests"),
    "render": _verb("render", "Print manifests after templating and overlays.", _MANIFESTS, "manifests"),
    "graph": _verb("graph", "Print what depends on what.", _MANIFESTS, "manifests"),
    "schema": _verb("schema", "Print the JSON Schema of a kind.", _MANIFESTS, "manifests"),
    "explain": _verb("explain", "Explain a field: type, default, update class.", _MANIFESTS, "manifests"),
    "reconcile": _verb("reconcile", "Heal drift, once or with --watch.", _UPKEEP),
    "adopt": _verb("adopt", "Take a running process or URL under management.", _UPKEEP),
    "doctor": _verb("doctor", "Find strays, open journals, stale leases, bad modes; --fix.", _UPKEEP),
    "models": Branch("Models of the Hugging Face cache.", MODELS, _UPKEEP),
    "config": Branch("Contexts and defaults.", CONFIG, _UPKEEP),
    "completion": _verb("completion", "Print the completion script of a shell.", _UPKEEP),
    "version": _verb("version", "Print the version.", _UPKEEP),
    "inf": Branch("Inference services and their models.", INF, _SHORTCUTS),
    "agent": Branch("Agent services, sessions and rewards.", AGENT, _SHORTCUTS),
    "train": Branch("Training jobs.", TRAIN, _SHORTCUTS),
    "weight-update": Branch("Weight-update gateways, which the training side starts.", WEIGHT_UPDATE, _SHORTCUTS),
}
