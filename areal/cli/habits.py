"""What users of kubectl, Docker Compose, Terraform, Helm and Ollama type, and what does the same here.

Imported only for an unknown command or option.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from areal.errors import did_you_mean

_COMMANDS = {
    **dict.fromkeys(("create", "up", "edit", "patch", "label", "annotate", "install", "upgrade"), "apply -f FILE"),
    **dict.fromkeys(("down", "destroy", "rm", "uninstall"), "delete"),
    **dict.fromkeys(("ls", "list", "status"), "get"),
    **dict.fromkeys(("show", "inspect"), "describe"),
    **dict.fromkeys(("run", "serve"), "inf run"),
    **dict.fromkeys(("attach", "cp", "debug", "exec", "ps"), "get processes"),
    **dict.fromkeys(("expose", "port-forward", "proxy"), "get -o wide"),
    **dict.fromkeys(("help", "options"), "--help"),
    "api-resources": "get kinds",
    "autoscale": "scale",
    "chat": "inf chat",
    "cluster-info": "doctor",
    "kustomize": "render -k DIR",
    "lint": "validate",
    "plan": "diff -f FILE",
    "pull": "models pull",
    "replace": "apply -f FILE --replace",
    "rollout": "wait --for ready",
    "rollout history": "history",
    "rollout restart": "restart",
    "rollout undo": "rollback",
    "set": "apply -f FILE --set PATH=VALUE",
    "start": "resume",
    "stop": "suspend",
    "template": "render",
}
_NAMESPACES = "there are no namespaces: --home DIR, or AREAL_HOME, separates objects"
_OPTIONS = {
    **dict.fromkeys(("-A", "--all-namespaces", "-n", "--namespace"), _NAMESPACES),
    **dict.fromkeys(("-L", "--label-columns", "--show-labels"), "-o jsonpath='{.items[*].metadata.labels}'"),
    **dict.fromkeys(("--now", "--grace-period"), "areal delete --grace TIME; --grace 0 kills at once"),
    "--all-containers": "leave it out: the logs of all processes are printed",
    "--dry-run": "areal diff -f FILE prints the plan of an apply; areal graph shows what refers to an object",
    "--field-manager": "leave it out: areal get --show-origin names the owner of each field",
    "--field-selector": """-l for labels; -o jsonpath='{.items[?(@.status.phase=="Ready")].metadata.name}'""",
    "--force": "delete: --grace 0 kills at once; apply: --replace deletes objects and creates them again",
    "--no-headers": "-o name, -o jsonl and -o jsonpath=EXPR print no headers",
    "--record": "leave it out: areal history shows who applied which file",
    "--recursive": "leave it out, or name a field: KIND.spec.FIELD",
    "--server-side": "leave it out: fields have owners, and --force-conflicts takes fields over",
    "--since-time": "--since TIME: 90s, 5m, 2h",
    "--validate": "leave it out: manifests are always checked",
    "--wait": "leave it out: the command waits, unless --no-wait is given",
}


def unknown_command(ctx: click.Context, words: Sequence[str], known: Iterable[str]) -> click.UsageError:
    """Return the error for ``words``, the first of which is no command of ``ctx``."""
    meant = (_COMMANDS.get(" ".join(words[:2])) or _COMMANDS.get(words[0])) if ctx.parent is None else None
    suggestion = f' (did you mean "{meant}"?)' if meant else did_you_mean(words[0], known)
    return click.UsageError(f'no such command "{words[0]}"{suggestion}', ctx)


def option_hint(error: click.UsageError) -> str | None:
    """Return what to write instead of the option that ``error`` refuses; None if no other tool has it."""
    if isinstance(error, (click.NoSuchOption, click.BadOptionUsage)):
        return _OPTIONS.get(error.option_name)
    return None
