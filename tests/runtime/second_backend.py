"""A second backend, as another package would bring it: runs are kept in a folder of its own, on a node with a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from areal.runtime.backends.base import RunSpec, RunState
from areal.runtime.backends.local import LocalBackend

NAME = "second"
NODE = "node-7"


class SecondBackend(LocalBackend):
    name = NAME

    def __init__(self, home_root: Path, lease_dir: Path | None, crash: Callable[[str], None]) -> None:
        super().__init__(home_root / "second", lease_dir, crash)

    def start(self, spec: RunSpec, *, on_pid: Callable[[int], None] = lambda pid: None) -> RunState:
        return _on_node(super().start(spec, on_pid=on_pid))

    def observe(self, uids: Sequence[str] | None = None) -> dict[str, RunState]:
        return {uid: _on_node(state) for uid, state in super().observe(uids).items()}


def _on_node(state: RunState) -> RunState:
    return replace(state, node=NODE, job_id=f"job-{state.spec.uid}")
