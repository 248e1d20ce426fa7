"""``Toy``: processes that say something."""

from __future__ import annotations

from typing import Annotated, ClassVar

from areal.resources.fields import Replicas, SpecModel, Text
from areal.resources.tree import UpdateClass


class ToySpec(SpecModel):
    """Says `words` over HTTP, from each of its `replicas`."""

    REPLACEABLE: ClassVar = True
    EXAMPLE: ClassVar = ("my-toy", {"words": "hello"})

    words: Annotated[Text, UpdateClass.ROLL]
    """What it says."""
    replicas: Annotated[Replicas, UpdateClass.HOT] = 1
    """Number of processes."""
    maker: Annotated[Text, UpdateClass.IMMUTABLE] = "acme"
    """Who made it."""
    suspend: Annotated[bool, UpdateClass.HOT] = False
    """True: no process runs; the object is kept."""
