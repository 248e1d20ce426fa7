"""``areal doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from areal.cli import options
from areal.cli.acting import acting
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.output.emit import emit_rows, show
from areal.cli.output.table import field

if TYPE_CHECKING:
    from areal.reconcilers.doctor import Finding

_COLUMNS = (
    field("SEVERITY", "severity", state=True),
    field("FIXED", "fixed"),
    field("WHAT", "what"),
    field("WHY", "why", wide=True),
    field("FIX", "fixCommand"),
)


@click.command()
@click.option("--fix", is_flag=True, help="Repair what can be repaired without losing anything.")
@click.option("--security", is_flag=True, help="Also: exposed ports, file modes, keys in the environment.")
@options.yes
@options.lock_timeout
@options.output()
@options.common
@pass_invocation
def doctor(cli: Invocation, fix: bool, security: bool) -> int:
    """Find strays, open journals, stale leases, GPU squatters, a home on NFS, damaged files.

    Exit status 1 when something is left to repair.
    """
    from areal.reconcilers.doctor import doctor as examine

    with acting(cli) as context:
        findings = examine(context, fix, security)
    rows = [_row(finding) for finding in findings]
    if cli.format.kind == "table":
        show("\n".join(line for finding in findings for line in _lines(finding)))
        if not findings:
            cli.say("nothing found")
    else:
        emit_rows(cli, rows, _COLUMNS, name=lambda row: str(row["what"]), empty="nothing found")
    return 1 if any(not item.fixed and item.severity != "info" for item in findings) else 0


def _row(finding: Finding) -> dict[str, Any]:
    return {
        "severity": finding.severity,
        "what": finding.what,
        "why": finding.why,
        "fixCommand": finding.fix_command,
        "fixed": finding.fixed,
    }


def _lines(finding: Finding) -> list[str]:
    head = f"{'fixed' if finding.fixed else finding.severity}: {finding.what}"
    lines = [head, f"  {finding.why}"] if finding.why else [head]
    if finding.fix_command and not finding.fixed:
        lines.append(f"  hint: {finding.fix_command}")
    return lines
