"""Entry point of ``areal``: has the command tree as a static table, runs one command, and turns its errors into a
message and an exit status.

``areal --help`` and completion read only the table, so this module imports little besides click and the options. The
module of a command is imported when the command is used. Names are frozen, since scripts depend on them
(``tests/cli/tree.json``).
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal.cli.options import Invocation, global_options, refuse_empty, take_equals
from areal.interrupt import STATUS, is_interrupt
from areal.terminal import OutputLost, guarded

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Leaf(NamedTuple):
    """``failed``: the exit status of an unexpected failure, not 1 where 1 answers the command's question."""

    target: str  # "module:attribute", the click command
    help: str
    section: str = "Commands"
    failed: int = 1


class Subtree(NamedTuple):
    help: str
    table: Mapping[str, Leaf | Subtree]
    section: str = "Commands"


_CONVERGE = "Converge"
_LOOK = "Look"
_MANIFESTS = "Manifests (no state, no GPU, no network)"
_UPKEEP = "Upkeep"
_SHORTCUTS = "Shortcuts: the same resources and the same reconciler"


def _leaf(target: str, text: str, section: str = "Commands", *, failed: int = 1) -> Leaf:
    return Leaf(f"areal.cli.{target}", text, section, failed)


_UNEXPECTED = 70  # EX_SOFTWARE of sysexits.h


INF_SESSIONS: dict[str, Leaf | Subtree] = {
    "list": _leaf("inf.trajectories:sessions_list", "List sessions: state, turns, rewards, age."),
    "show": _leaf("inf.trajectories:sessions_show", "Show a session's trajectories and interactions."),
}

TRAJECTORIES: dict[str, Leaf | Subtree] = {
    "show": _leaf("inf.trajectories:show", "Show tokens with logprobs, versions and rewards.")
}

INF: dict[str, Leaf | Subtree] = {
    "run": _leaf("inf.service:run", "Start an inference service, and a model with --model."),
    "stop": _leaf("inf.service:stop", "Stop a service and its models."),
    "status": _leaf("inf.status:status", "Show a service's health: components, models, routes.", failed=_UNEXPECTED),
    "ps": _leaf("inf.status:ps", "List inference services."),
    "register": _leaf("inf.service:register", "Add a model to a service: own replicas, or an external URL."),
    "deregister": _leaf("inf.service:deregister", "Take a model out of a service and stop its replicas."),
    "models": _leaf("inf.status:models", "List a service's models."),
    "scaleup": _leaf("inf.service:scaleup", "Add replicas of a model."),
    "scaledown": _leaf("inf.service:scaledown", "Drain and remove replicas of a model."),
    "chat": _leaf("inf.chat:chat", "Talk to a model: one shot or a REPL."),
    "collect": _leaf("inf.collect:collect", "Collect a batch of rollout trajectories."),
    "sessions": Subtree("List and show RL sessions.", INF_SESSIONS),
    "trajectories": Subtree("Look at recorded trajectories.", TRAJECTORIES),
    "logs": _leaf("inf.status:logs", "Print logs of a service's processes."),
}

SESSIONS: dict[str, Leaf | Subtree] = {
    "list": _leaf("agent.sessions:sessions_list", "List sessions."),
    "show": _leaf("agent.sessions:sessions_show", "Show the history of a session."),
    "new": _leaf("agent.sessions:sessions_new", "Open a session."),
    "switch": _leaf("agent.sessions:sessions_switch", "Make a session the current one."),
    "close": _leaf("agent.sessions:sessions_close", "Close a session."),
}

AGENT: dict[str, Leaf | Subtree] = {
    "run": _leaf("agent.service:run", "Start an agent service."),
    "stop": _leaf("agent.service:stop", "Stop an agent service."),
    "status": _leaf("agent.service:status", "Show the health of an agent service.", failed=_UNEXPECTED),
    "ps": _leaf("agent.service:ps", "List agent services."),
    "logs": _leaf("agent.service:logs", "Print logs of an agent service's processes."),
    "scaleup": _leaf("agent.service:scaleup", "Add worker and data-proxy pairs."),
    "scaledown": _leaf("agent.service:scaledown", "Drain and remove pairs."),
    "chat": _leaf("agent.chat:chat", "Talk to the agent: one shot or a REPL."),
    "sessions": Subtree("List, show, open, switch and close sessions.", SESSIONS),
    "reward": _leaf("agent.sessions:reward", "Give a reward to a session's interaction."),
    "export": _leaf("agent.sessions:export", "Export a session's trajectory."),
}

TRAIN: dict[str, Leaf | Subtree] = {
    "run": _leaf("train:run", "Run a driver in the foreground; exits with its status."),
    "start": _leaf("train:start", "Run a driver detached; prints the job's name."),
    "stop": _leaf("train:stop", "Stop a job by name."),
    "ps": _leaf("train:ps", "List jobs."),
    "status": _leaf("train:status", "Show a job: phase, step, reward, throughput, staleness.", failed=_UNEXPECTED),
    "wait": _leaf("train:wait", "Wait until a job has ended; shows its step and ETA."),
    "logs": _leaf("train:logs", "Print the output of a job."),
    "estimate": _leaf("estimate:estimate", "Estimate a job's memory on each GPU and time of a step."),
    "watch": _leaf("watch:watch", "Watch jobs for alerts; exits 8 when one fires."),
    "metrics": _leaf("curves:metrics", "Draw and compare curves of jobs, in the terminal or as a picture."),
    "diff": _leaf("runs_diff:diff", "Compare jobs: configurations, metrics at equal steps, significance."),
    "trajectories": _leaf("inf.trajectories:of_job", "Show a job's samples: tokens, rewards, advantages."),
}

WEIGHT_UPDATE: dict[str, Leaf | Subtree] = {
    "status": _leaf("weight_update:status", "Show the health of a weight-update gateway."),
    "pairs": _leaf("weight_update:pairs", "List train-inference pairs, their versions and last update."),
    "ps": _leaf("weight_update:ps", "List weight-update gateways."),
    "logs": _leaf("weight_update:logs", "Print logs of a weight-update gateway."),
    "force-sync": _leaf("weight_update:force_sync", "Push the training side's weights now."),
    "release": _leaf("weight_update:release", "Stop waiting for weights of a trainer that is gone."),
}

CONFIG: dict[str, Leaf | Subtree] = {
    "view": _leaf("config:view", "Print the configuration."),
    "get-contexts": _leaf("config:get_contexts", "List contexts."),
    "current-context": _leaf("config:current_context", "Print the current context."),
    "use-context": _leaf("config:use_context", "Make a context the current one ('local' is this home)."),
    "set-context": _leaf("config:set_context", "Add or change a context: a remote gateway."),
    "delete-context": _leaf("config:delete_context", "Remove a context."),
    "set": _leaf("config:set_", "Set a default, e.g. `areal config set output wide`."),
    "unset": _leaf("config:unset", "Remove a default."),
    "path": _leaf("config:path", "Print where the configuration file is."),
}

MODELS: dict[str, Leaf | Subtree] = {
    "pull": _leaf("models:pull", "Download a model."),
    "ls": _leaf("models:ls", "List downloaded models."),
    "rm": _leaf("models:rm", "Remove a downloaded model."),
}

GENERATE: dict[str, Leaf | Subtree] = {
    "systemd": _leaf("generate:systemd", "Write a systemd unit that starts a home's services at boot."),
    "docker": _leaf("generate:docker", "Write a Dockerfile of an image that serves manifests."),
}

ROOT: dict[str, Leaf | Subtree] = {
    "apply": _leaf("apply:apply", "Converge to manifests.", _CONVERGE),
    "diff": _leaf("apply:diff", "Print the plan that apply would run.", _CONVERGE, failed=_UNEXPECTED),
    "delete": _leaf("apply:delete", "Stop and forget objects.", _CONVERGE),
    "scale": _leaf("operate:scale", "Set the number of replicas.", _CONVERGE),
    "restart": _leaf("operate:restart", "Restart an object's processes, rolling where it can.", _CONVERGE),
    "suspend": _leaf("operate:suspend", "Stop an object's processes and keep the object.", _CONVERGE),
    "resume": _leaf("operate:resume", "Start a suspended object again.", _CONVERGE),
    "rollback": _leaf("apply:rollback", "Go back to an earlier revision.", _CONVERGE),
    "wait": _leaf("operate:wait", "Wait for a condition.", _CONVERGE),
    "get": _leaf("get:get", "List kinds, objects or processes.", _LOOK),
    "describe": _leaf("get:describe", "Show everything about one object.", _LOOK),
    "history": _leaf("apply:history", "List the revisions of an object.", _LOOK),
    "logs": _leaf("logs:logs", "Print logs of an object's processes.", _LOOK),
    "events": _leaf("get:events", "List events of objects, newest last.", _LOOK),
    "top": _leaf("get:top", "Show CPU, memory, GPU and tokens/s of each process.", _LOOK),
    "ui": _leaf("ui:ui", "Serve the live page of this home.", _LOOK),
    "eval": _leaf("evaluate:evaluate", "Score a model or a job's weights on a data set.", _LOOK),
    "init": _leaf("manifest:init", "Write a commented manifest of a kind.", _MANIFESTS),
    "convert": _leaf("convert:convert", "Convert a configuration of another framework.", _MANIFESTS),
    "validate": _leaf("manifest:validate", "Check manifests; lists every error with its position.", _MANIFESTS),
    "render": _leaf("manifest:render", "Print manifests after templating and overlays.", _MANIFESTS),
    "graph": _leaf("manifest:graph", "Print the dependencies of objects.", _MANIFESTS),
    "schema": _leaf("manifest:schema", "Print the JSON Schema of a kind.", _MANIFESTS),
    "explain": _leaf("manifest:explain", "Explain a field: type, default, update class.", _MANIFESTS),
    "reconcile": _leaf("operate:reconcile", "Heal drift, once or with --watch.", _UPKEEP),
    "adopt": _leaf("operate:adopt", "Take a running process or URL under management.", _UPKEEP),
    "doctor": _leaf(
        "operate:doctor", "Find strays, open journals, stale leases, bad modes.", _UPKEEP, failed=_UNEXPECTED
    ),
    "models": Subtree("Models of the Hugging Face cache.", MODELS, _UPKEEP),
    "generate": Subtree("Files by which services come back after a boot.", GENERATE, _UPKEEP),
    "config": Subtree("Contexts and defaults.", CONFIG, _UPKEEP),
    "completion": _leaf("config:completion", "Print the completion script of a shell.", _UPKEEP),
    "version": _leaf("config:version", "Print the version.", _UPKEEP),
    "inf": Subtree("Inference services and their models.", INF, _SHORTCUTS),
    "agent": Subtree("Agent services, sessions and rewards.", AGENT, _SHORTCUTS),
    "train": Subtree("Training jobs.", TRAIN, _SHORTCUTS),
    "weight-update": Subtree("Weight-update gateways, which the training side starts.", WEIGHT_UPDATE, _SHORTCUTS),
}


CONTEXT_SETTINGS: dict[str, object] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class LazyGroup(click.Group):
    """A group of commands in a static table. Lists, help and completion of names read the table and import nothing."""

    def __init__(self, *args: Any, table: Mapping[str, Leaf | Subtree], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self.table.get(cmd_name)
        if entry is None:
            return None
        if isinstance(entry, Subtree):
            return LazyGroup(name=cmd_name, table=entry.table, help=entry.help, context_settings=CONTEXT_SETTINGS)
        return load(cmd_name, entry)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "create" and "new" in self.table:  # as it is called elsewhere
            args = ["new", *args[1:]]
        entry = self.table.get(args[0])
        if isinstance(entry, Leaf):
            ctx.ensure_object(Invocation).failed = entry.failed
        if ctx.resilient_parsing or entry is not None or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        from areal.cli.habits import unknown_command

        raise unknown_command(ctx, args, self.table)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit(0)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, entry in self.table.items():
            sections.setdefault(entry.section, []).append((name, entry.help))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        names = [
            CompletionItem(name, help=entry.help) for name, entry in self.table.items() if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)


def load(name: str, leaf: Leaf) -> click.Command:
    """Import the command of ``leaf``. Its short help is taken from the table, so that the two cannot differ."""
    module_name, attribute = leaf.target.split(":")
    __import__(module_name)
    command = getattr(sys.modules[module_name], attribute)
    assert isinstance(command, click.Command), f"{leaf.target} is not a click command"
    command.name = name
    command.short_help = leaf.help
    return take_equals(refuse_empty(command))


_BROKEN_PIPE = 141
_COMPLETE = "_AREAL_COMPLETE"


@click.group(cls=LazyGroup, table=ROOT, context_settings=CONTEXT_SETTINGS)
@global_options
def cli() -> None:
    """kubectl for LLM reinforcement learning, with no cluster and no daemon underneath.

    Write resources in YAML; `areal apply` makes the processes agree with them.
    """


refuse_empty(cli)


def main() -> int:
    """Run the console script. Most of what a command makes lives until it ends: collections of garbage are rare, and
    ``gc.freeze`` skips those at exit. They would take a tenth of the time of a short command, a fifth of a long one."""
    gc.set_threshold(100_000, 20, 20)
    _skip_plugins_of_pydantic()
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that cannot be encoded (in a name, or half a surrogate pair in a response) must not fail.
            utf8 = stream.encoding.lower() in ("utf-8", "utf8")
            stream.reconfigure(errors="backslashreplace" if utf8 else "replace")
    status = run()
    gc.freeze()
    return status


def _skip_plugins_of_pydantic() -> None:
    """Keep pydantic from searching all installed distributions for plugins, which takes a fifth of its import time and
    is useless for a command. Other versions of pydantic may search again."""
    module = ModuleType("pydantic.plugin._loader")
    module.get_plugins = tuple  # type: ignore[attr-defined]
    sys.modules.setdefault(module.__name__, module)


def _open_streams() -> None:
    """Open the standard streams that the caller has closed. Reading them returns nothing, and writing fails, as for a
    closed stream. Otherwise the next file that is opened would get the number of a closed stream. Also reset signals
    that the caller blocks, and SIGCHLD if the caller ignores it."""
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def run(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status (docs/reference/cli.md)."""
    with guarded():
        return _run(args)


def _run(args: Sequence[str] | None) -> int:
    invocation = Invocation()
    instruction = os.environ.get(_COMPLETE)
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {"obj": invocation}, "areal", _COMPLETE, instruction)
    try:
        status = _invoke(list(sys.argv[1:] if args is None else args), invocation)
        sys.stdout.flush()
    except click.Abort:
        return STATUS
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every failure becomes a message and a status
        if isinstance(error, OutputLost) and error.reader_left:
            return _BROKEN_PIPE
        if isinstance(error, KeyboardInterrupt) or is_interrupt(error):
            invocation.info("interrupted")
            return STATUS
        from areal.cli.failures import report

        return report(error, invocation)
    return status


def _invoke(args: list[str], invocation: Invocation) -> int:
    """Run the command and return its exit status. ``cli.main`` would turn a closed pipe into status 1."""
    try:
        with cli.make_context("areal", args, obj=invocation) as ctx:
            result = cli.invoke(ctx)
    except click.exceptions.Exit as done:
        return done.exit_code
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
