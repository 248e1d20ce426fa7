"""A kind that areal does not have: its registry line, a spec module, a controller module, and the process it runs."""

from __future__ import annotations

from areal.resources.kinds import KindInfo

TOY = KindInfo("Toy", "toys", ("ty",), 9, f"{__name__}.spec:ToySpec", f"{__name__}.controller:ToyController")
