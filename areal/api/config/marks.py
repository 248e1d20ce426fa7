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
    """Accepted without effect. ``why`` completes "FIELD has no effect: ". ``job``: but for a driver that a job starts,
    which has been laid out by it."""

    why: str
    job: bool = False


PLACEMENT = Inert("processes are placed by the resources (areal apply), not by the driver")
"""Scheduling fields: where processes run is said in a manifest."""

RANKS = Inert(
    "as many processes train as were started (areal train run starts those that it says, or torchrun)", job=True
)
"""On how many devices a model is trained."""
