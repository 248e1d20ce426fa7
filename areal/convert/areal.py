"""AReaL: each key keeps its name, and is mapped, ignored or refused.

The class of the configuration decides which. Another process asks it (``check``), so this one needs no module of
training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal.convert.drafts import Draft, Entry, Fate
from areal.convert.reading import flat, without_references
from areal.resources.tree import ABSENT, get_path

TRAINERS = {"grpo": "GRPOConfig", "ppo": "PPOConfig", "sft": "SFTConfig", "rw": "RWConfig", "dpo": "DPOConfig"}
_PASSES = 5

Check = Callable[[str, Mapping[str, object]], Sequence[Mapping[str, Any]]]
"""Paths and messages of a configuration's faults and notes, by the name of its class."""


def trainer_of(document: Mapping[str, Any]) -> str:
    """Return the built-in trainer of a configuration. If ``trainer.type`` names none, its sections decide."""
    named = (document.get("trainer") or {}).get("type")
    if named in TRAINERS:
        return str(named)
    if "gconfig" in document:
        return "ppo" if document.get("critic") else "grpo"
    engine = document.get("actor") or document.get("model") or {}
    if engine.get("is_critic"):
        return "rw"
    return "dpo" if "beta" in engine else "sft"


def convert(document: Mapping[str, Any], trainer: str, check: Check) -> Draft:
    """Return the draft of a TrainJob. The check is repeated without refused keys, as a fault can hide others."""
    config = copy.deepcopy(dict(document))
    config["trainer"] = {**(config.get("trainer") or {}), "type": trainer}
    values = without_references(dict(flat(document)), {})
    refused, ignored = dict[str, str](), dict[str, str]()
    for _ in range(_PASSES):
        answers = check(TRAINERS[trainer], config)
        found = [(tuple(map(str, each["path"])), each["message"], each["kind"]) for each in answers]
        faults = {path: message for path, message, kind in found if kind == "fault" and path}
        ignored |= {".".join(path): message for path, message, kind in found if kind == "no effect"}
        unsolved = [path for path in faults if not _remove(config, path)]
        refused = {".".join(path): message for path, message in faults.items()} | refused
        if len(unsolved) == len(faults):
            break
    if "defaults" in document:
        refused["defaults"] = "Hydra's list of files is not read: write their keys here"
    draft = Draft(values, config)
    for key, value in values.items():
        fate = next(
            (
                (fate, noted[each])
                for fate, noted in ((Fate.REFUSED, refused), (Fate.IGNORED, ignored))
                for each in _above(key)
                if each in noted
            ),
            (Fate.MAPPED, ""),
        )
        draft.entries.append(Entry(key, value, fate[0], key if fate[0] is Fate.MAPPED else "", fate[1]))
    model = config.get("actor") or config.get("model") or {}
    if isinstance(model, dict) and not model.get("path"):
        refused.setdefault("actor.path", "no model is named: add actor.path=NAME")
    known = {above for key in values for above in _above(key)}
    draft.entries += [Entry(key, None, Fate.REFUSED, note=note) for key, note in refused.items() if key not in known]
    return draft


def _above(key: str) -> list[str]:
    """Return ``key`` and the sections that contain it, the innermost first."""
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _remove(config: dict[str, object], path: Sequence[str]) -> bool:
    """Remove a key, and return whether the configuration had it."""
    parent = get_path(config, tuple(path[:-1])) if len(path) > 1 else config
    if parent is ABSENT or not isinstance(parent, dict) or path[-1] not in parent:
        return False
    del parent[path[-1]]
    return True
