"""Which driver a job runs, and with which words. Pure but for reading the configuration's file.

Precedence: the spec's (or the command line's) driver, else a top-level ``driver:`` of the configuration, else the
built-in one of its ``trainer.type``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal.errors import UsageFault
from areal.resources.diagnostics import Diagnostic, ManifestError, Pos
from areal.resources.suggest import did_you_mean

_BUILT_IN = "areal.training.drivers"
BUILT_IN = {kind: f"{_BUILT_IN}:{kind}" for kind in ("grpo", "ppo", "sft", "rw", "dpo")} | {
    "null": f"{_BUILT_IN}:evaluate"
}
_TYPE = "trainer.type"


def read_config(path: Path) -> dict[str, Any]:
    """The configuration as it is written, nothing resolved. Raises UsageFault, ManifestError."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageFault(f"the configuration {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        pos = Pos(str(path), mark.line + 1, mark.column + 1) if mark is not None else Pos(str(path), 1, 1)
        problem = getattr(error, "problem", None) or str(error)
        raise ManifestError([Diagnostic(pos, "", f"the configuration is no YAML: {problem}")]) from error
    if data is not None and not isinstance(data, dict):
        message = f"the configuration must be a map, not {type(data).__name__}"
        raise ManifestError([Diagnostic(Pos(str(path), 1, 1), "", message)])
    return data or {}


def choose_driver(given: str | None, config: Mapping[str, Any], overrides: Sequence[str], where: str) -> str:
    """``module:function``. ``where`` names the configuration in errors. Raises UsageFault."""
    named = given or overridden("driver", overrides) or config.get("driver")
    if named:
        return str(named)
    trainer = config.get("trainer")
    kind = overridden(_TYPE, overrides) or (trainer.get("type") if isinstance(trainer, Mapping) else None)
    if kind is None:
        raise UsageFault(
            f"nothing says which driver runs {where}",
            hint="--driver module:function, or in the configuration `driver:`, or `trainer: {type: grpo}`",
        )
    if str(kind) not in BUILT_IN:
        guess = did_you_mean(str(kind), list(BUILT_IN))
        raise UsageFault(f"{where}: {_TYPE} {kind!r} has no built-in driver{guess}", hint=", ".join(BUILT_IN))
    return BUILT_IN[str(kind)]


def overridden(key: str, overrides: Sequence[str]) -> str | None:
    """The last override's word for a top-level or dotted key, with or without Hydra's ``+``."""
    found = [value for name, sign, value in (item.partition("=") for item in overrides) if sign and _is(name, key)]
    return found[-1].strip("'\"") if found else None


def _is(name: str, key: str) -> bool:
    return name.lstrip("+") == key
