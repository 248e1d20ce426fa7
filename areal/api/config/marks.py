"""What is said of a configuration field beside its type, as ``Annotated`` marks.

Drivers and YAML written for AReaL name fields that have no meaning here, or none yet. None of them is dropped
silently: an ``Absent`` field is an error where it is set to anything but its default, an ``Inert`` one is accepted and
reported once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Absent:
    """Not supported. ``why`` completes "FIELD is not supported: "."""

    why: str


@dataclass(frozen=True)
class Inert:
    """Accepted without effect. ``why`` completes "FIELD has no effect: "."""

    why: str


PLACEMENT = Inert("processes are placed by the resources (areal apply), not by the driver")
"""Scheduling fields: where processes run is said in a manifest."""

ADAPTER = Inert("the adapter that is trained is served as the model's weights, under the model's own name")
"""What the adapter is called in the engine."""
