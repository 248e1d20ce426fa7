"""``areal.overlay.yaml``: what a folder changes in the manifests it builds on. Read by ``overlay``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from areal.resources.fields import SpecModel, Text
from areal.resources.update import Update


class PatchTarget(SpecModel):
    """Which resources a patch changes: those that match all that is given."""

    kind: Annotated[Literal["InferenceService", "Model", "AgentService", "TrainJob"] | None, Update.META] = None
    """Their kind. Absent: any."""
    name: Annotated[Text | None, Update.META] = None
    """Their name before any prefix; `*` and `?` match. Absent: any."""
    labels: Annotated[dict[str, str], Update.META] = {}
    """Labels they carry."""


class Patch(SpecModel):
    """A change to some resources."""

    target: Annotated[PatchTarget, Update.META]
    """Which resources. Matching none is an error."""
    merge: Annotated[dict[str, JsonValue], Update.META]
    """What is merged over each: maps merge, lists of named maps merge by name, anything else replaces, `null` removes;
    `$patch: delete`, `$patch: replace` and `$append: [...]` say it where that is not meant."""


class OverlaySection(SpecModel):
    """What an overlay, or one of its profiles, changes."""

    bases: Annotated[list[Text], Update.META] = []
    """Manifests, folders of manifests, and other overlays to build on, relative to this file."""
    values: Annotated[dict[str, JsonValue], Update.META] = {}
    """`values.*` for expressions, here and in the bases; an overlay on top of this one wins."""
    name_prefix: Annotated[str, Field(pattern=r"^([a-z0-9][-a-z0-9]*)?$"), Update.META] = ""
    """Put before every name; references between the resources follow."""
    labels: Annotated[dict[str, str], Update.META] = {}
    """Labels put on every resource."""
    annotations: Annotated[dict[str, str], Update.META] = {}
    """Annotations put on every resource."""
    patches: Annotated[list[Patch], Update.META] = []
    """Changes, in order."""


class Overlay(OverlaySection):
    """A variation of manifests that stay as they are."""

    api_version: Annotated[Literal["areal.dev/v1alpha1"], Update.META]
    """Version of this format."""
    kind: Annotated[Literal["Overlay"], Update.META]
    """Says that the file is an overlay."""
    profiles: Annotated[dict[str, OverlaySection], Update.META] = {}
    """Further changes, by the name given with `--profile`."""
