"""What a data proxy keeps on disk, and for how long: the vault of this process, from its flags."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from areal.errors import UsageFault
from areal.services.inference.recording.folder import REGISTRATIONS
from areal.services.inference.recording.journal import Rules
from areal.services.inference.recording.vault import ADOPT_AFTER_S, Vault, open_vault
from areal.services.web.tasks import background

_RUN_UID = "AREAL_RUN_UID"


def add_keeping_arguments(parser: argparse.ArgumentParser) -> None:
    """Durations are in seconds."""
    rules = Rules()
    parser.add_argument("--state-dir", help="folder of this model's journals; without it no sessions")
    parser.add_argument("--adopt-after", type=float, default=ADOPT_AFTER_S, help="take over a journal free for so long")
    parser.add_argument("--reward-finish-timeout", type=float, default=rules.finish_timeout_s)
    parser.add_argument("--export-retention", type=float, default=rules.export_retention_s)
    parser.add_argument("--visibility-timeout", type=float, default=rules.visibility_timeout_s)
    parser.add_argument("--session-ttl", type=float, default=rules.session_ttl_s, help="of an idle, unrewarded session")
    parser.add_argument("--ready-ttl", type=float, default=rules.ready_ttl_s, help="of what nobody fetches")


@contextlib.asynccontextmanager
async def keeping(args: argparse.Namespace) -> AsyncIterator[Vault | None]:
    """The vault, with its upkeep, for as long as the body runs. Raises UsageFault."""
    if args.state_dir is None:
        yield None
        return
    vault = await open_vault(_root(args.state_dir), _uid(), _rules(args), adopt_after_s=args.adopt_after)
    try:
        async with background("journal-upkeep", vault.run):
            yield vault
    finally:
        await vault.close()


def _rules(args: argparse.Namespace) -> Rules:
    return Rules(
        finish_timeout_s=args.reward_finish_timeout,
        export_retention_s=args.export_retention,
        visibility_timeout_s=args.visibility_timeout,
        session_ttl_s=args.session_ttl,
        ready_ttl_s=args.ready_ttl,
    )


def _root(text: str) -> Path:
    root = Path(text)
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageFault(f"cannot make the state folder {root}: {error.strerror}") from error
    return root


def _uid() -> str:
    """The run's, so that a restarted process finds its own journal again."""
    return os.environ.get(_RUN_UID) or f"manual-{uuid4().hex[:12]}"


def registrations_file(vault: Vault | None) -> Path | None:
    """Where what is registered at this run is kept for its restart."""
    uid = os.environ.get(_RUN_UID)
    return vault.root / f"{uid}{REGISTRATIONS}" if vault is not None and uid else None


def keeping_details(vault: Vault | None) -> dict[str, Any]:
    """What the router has to know: which journals are here, which others there are, how many sessions live."""
    if vault is None:
        return {}
    failing = next((journal.commits.failing for journal in vault if journal.commits.failing), None)
    damaged = sum(len(journal.corrupt) for journal in vault) + len(vault.unreadable)
    return {
        "journals": list(vault.journals),
        "journals_elsewhere": list(vault.elsewhere),
        "sessions": sum(journal.live_sessions() for journal in vault),
        "journal_failing": failing,
        "journal_damaged": damaged,
    }
