"""What a change of a field costs, declared on the field itself as ``Annotated[int, Update.ROLL]``.

On a field that holds a map it is a floor: what every field inside costs at least, there. So a block that kinds share
is cheap to change in one (a gateway's scheduling) and not at all in another (a running job's).
"""

from __future__ import annotations

from enum import IntEnum


class Update(IntEnum):
    """Ordered by cost; a plan takes the highest class among the changed leaves and names the leaf that decided."""

    META = 0
    """Recorded only: no process learns of it."""
    HOT = 1
    """Applied to what runs: a call to a router or gateway, or replicas added or removed."""
    ROLL = 2
    """New processes beside the old ones, then the old ones drained: no request is lost."""
    RECREATE = 3
    """The old processes stop before the new ones start: requests fail in between."""
    IMMUTABLE = 4
    """Only by deleting and creating the object (``--replace``)."""
