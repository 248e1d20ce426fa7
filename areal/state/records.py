"""The values of the state and their form on disk: objects, revisions, and lists that say what they could not read.

Decoding trusts nothing: a body of another shape, of a newer format or of another object is refused with the reason.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from areal.resources.kinds import Ref
from areal.state.files import Unreadable
from areal.state.layers import APPLY, Layer, effective

FORMAT = 1
T = TypeVar("T")


@dataclass(frozen=True)
class StoredObject:
    """One object as recorded. ``spec`` is what the user asked for, without defaults; times since the epoch.

    A value: the dicts in it are never changed in place. ``generation`` counts changes of the effective spec,
    ``revision`` is the number of the last accepted one.
    """

    kind: str
    name: str
    uid: str
    generation: int = 1
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    depends_on: tuple[str, ...] = ()
    owner: str | None = None
    set_name: str | None = None
    layers: tuple[Layer, ...] = ()
    status: dict[str, Any] = field(default_factory=dict)
    created_at: float = 0.0
    revision: int = 0
    protected: bool = False

    @cached_property
    def spec(self) -> dict[str, Any]:
        return effective(self.layers)

    @property
    def ref(self) -> Ref:
        return Ref(self.kind, self.name)


@dataclass(frozen=True)
class Revision:
    """One accepted spec: the object as it was asked for, by whom, when, and from which file. No status."""

    number: int
    actor: str
    at: float
    source: dict[str, Any] | None
    object: StoredObject

    @property
    def spec(self) -> dict[str, Any]:
        """The effective spec, all layers merged."""
        return self.object.spec

    @property
    def applied(self) -> dict[str, Any]:
        """The manifest alone."""
        return next((layer.spec for layer in self.object.layers if layer.manager == APPLY), {})

    @property
    def labels(self) -> dict[str, str]:
        return self.object.labels


class Listing(list[T]):
    """What could be read, and beside it what could not: (path, reason)."""

    def __init__(self) -> None:
        super().__init__()
        self.unreadable: list[tuple[Path, str]] = []


def new_uid() -> str:
    """An identity that no other object, of any name, has had or will have."""
    return os.urandom(8).hex()


def encode(obj: StoredObject) -> dict[str, Any]:
    """An object as plain JSON values, in a fixed order: equal objects have equal bytes."""
    return {
        "format": FORMAT,
        "kind": obj.kind,
        "name": obj.name,
        "uid": obj.uid,
        "generation": obj.generation,
        "revision": obj.revision,
        "created_at": obj.created_at,
        "labels": obj.labels,
        "annotations": obj.annotations,
        "depends_on": list(obj.depends_on),
        "owner": obj.owner,
        "set_name": obj.set_name,
        "protected": obj.protected,
        "layers": [
            {"manager": one.manager, "actor": one.actor, "at": one.at, "source": one.source, "spec": one.spec}
            for one in obj.layers
        ],
        "status": obj.status,
    }


def decode(body: Any, path: Path | str) -> StoredObject:
    """The inverse of ``encode``. Raises Unreadable."""
    _check_format(body, path)
    try:
        fields = {**body, "depends_on": tuple(body["depends_on"])}
        fields["layers"] = tuple(Layer(**layer) for layer in body["layers"])
        del fields["format"]
        return StoredObject(**fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise Unreadable(path, f"it does not describe an object ({error})", damaged=True) from error


def encode_revision(revision: Revision) -> dict[str, Any]:
    body = {"format": FORMAT, "number": revision.number, "actor": revision.actor, "at": revision.at}
    return {**body, "source": revision.source, "object": encode(revision.object)}


def decode_revision(body: Any, path: Path | str) -> Revision:
    """The inverse of ``encode_revision``. Raises Unreadable."""
    _check_format(body, path)
    try:
        obj = decode(body["object"], path)
        return Revision(body["number"], body["actor"], body["at"], body["source"], obj)
    except KeyError as error:
        raise Unreadable(path, f"it does not describe a revision ({error} is missing)", damaged=True) from error


def _check_format(body: Any, path: Path | str) -> None:
    number = body.get("format") if isinstance(body, dict) else None
    if not isinstance(number, int):
        raise Unreadable(path, "it does not describe an object", damaged=True)
    if number > FORMAT:
        reason = f"a newer areal wrote it (format {number}, this one knows {FORMAT})"
        raise Unreadable(path, reason, damaged=False, hint="upgrade areal")
