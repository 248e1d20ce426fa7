"""The AgentService kind: its manifests are checked and recorded; running one is not implemented yet."""

from __future__ import annotations

from areal.errors import InvalidManifest
from areal.reconcilers.kinds import KindController
from areal.state.home import Home
from areal.state.records import StoredObject


class AgentServiceController(KindController):
    columns = (("ADDRESS", ("status", "address"), False), ("AGENT", ("spec", "agent"), True))

    def require_runnable(self, home: Home, found: StoredObject) -> None:
        raise InvalidManifest(
            f"{found.ref}: running a {self.kind} is not implemented yet; nothing was changed",
            hint="`areal validate` checks the manifest; with `suspend: true` it can be recorded",
        )
