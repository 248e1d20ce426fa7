"""``areal wait``."""

from __future__ import annotations

import re

import click

from areal.cli import options
from areal.cli.acting import acting, finish, timeout_s
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.targets import complete_targets, parse_refs, select
from areal.errors import UsageFault

_WORDS = ("ready", "deleted", "completed")
_FORMS = "ready, deleted, completed, condition=TYPE[=STATUS] or jsonpath=EXPR=VALUE"
_CONDITION = re.compile(r"condition=[A-Za-z]+(=[A-Za-z]+)?")


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="KIND/NAME | KIND NAME", shell_complete=complete_targets)
@click.option(
    "--for",
    "conditions",
    multiple=True,
    required=True,
    metavar="CONDITION",
    help=f"{_FORMS}; comma: or, repeated: and.",
)
@click.option("-l", "--selector", metavar="SELECTOR", help="Of one kind, the objects with these labels.")
@options.timeout("10m", "One deadline for everything (exit 7)")
@options.remote
@options.output()
@options.common
@pass_invocation
def wait(cli: Invocation, targets: tuple[str, ...], conditions: tuple[str, ...], selector: str | None) -> int:
    """Wait until objects meet conditions. Fails at once (exit 8) when they can no longer be met.

    \b
    areal wait model/qwen --for ready --timeout 20m
    areal wait job/gsm8k --for completed,condition=Stalled
    """
    from areal.cli.remote import gateway

    wanted = tuple(parse_alternatives(text) for text in conditions)
    chosen = gateway(cli)
    if chosen is not None:
        from areal.cli.remote_view import wait_remote

        return wait_remote(cli, chosen, parse_refs(targets), wanted, timeout_s(cli))
    from areal.reconcilers.waiting import wait as wait_for

    refs = select(cli.home, targets, selector) if selector is not None else parse_refs(targets)
    with acting(cli) as context:
        outcome = wait_for(context, refs, wanted, timeout_s(cli))
    return finish(cli, outcome, interrupted=context.interrupted.is_set())


def parse_alternatives(text: str) -> tuple[str, ...]:
    """``a,b`` as (a, b); a comma inside quotes or brackets separates nothing."""
    parts = re.findall(r"(?:[^,\[\]'\"{}]|\[[^\]]*\]|\{[^}]*\}|'[^']*'|\"[^\"]*\")+", text)
    if not parts or ",".join(parts) != text:
        raise UsageFault(f"cannot read --for {text!r}", hint=f"write {_FORMS}")
    return tuple(_condition(part.strip()) for part in parts)


def _condition(text: str) -> str:
    if text.lower() in _WORDS:
        return text.lower()
    if _CONDITION.fullmatch(text):
        return text
    if text.startswith("jsonpath="):
        from areal.resources.jsonpath import compile_template

        expression, equals, _ = text.removeprefix("jsonpath=").rpartition("=")
        if not equals:
            raise UsageFault(f"--for {text} names no value", hint="write jsonpath={.status.phase}=Running")
        compile_template(expression)
        return text
    from areal.resources.suggest import did_you_mean

    raise UsageFault(f'no condition "{text}"{did_you_mean(text, _WORDS)}', hint=f"write {_FORMS}")
