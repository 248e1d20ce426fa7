"""How a Toy is run."""

from __future__ import annotations

import sys
from pathlib import Path

from areal.reconcilers.kinds import SimpleController
from areal.reconcilers.launch import Slot
from areal.state.records import StoredObject


class ToyController(SimpleController):
    component = "speaker"
    fields = ("words",)
    columns = (("ADDRESS", ("status", "address"), False), ("WORDS", ("spec", "words"), False))

    def argv(self, found: StoredObject, slot: Slot) -> list[str]:
        server = str(Path(__file__).with_name("server.py"))
        return [sys.executable, server, slot.host, str(slot.port), str(found.spec["words"])]
