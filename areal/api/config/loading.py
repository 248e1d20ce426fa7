"""``load_expr_config``: a driver's configuration from its command line. Nothing is written, and no global is set but
how a driver's process tells errors that nobody catches."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path as FilePath
from typing import Any, NoReturn, TypeVar

import yaml

from areal.api.config.building import Faults, Path, build, over
from areal.api.config.experiment import BaseExperimentConfig
from areal.api.config.keys import TRAINERS, is_declared, suggestion
from areal.api.config.overrides import BadOverride, dotted, parse_override, place, take_out
from areal.api.config.positions import key_marks, mark_of
from areal.api.config.uncaught import tell_plainly
from areal.errors import InvalidManifest, NotFound, UsageFault

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConfigFault:
    """``override``: the one that set the key. ``mark``: line and column in the file, from 1; None where the file does
    not have the key."""

    path: Path
    message: str
    file: str = ""
    mark: tuple[int, int] | None = None
    override: str | None = None

    def __str__(self) -> str:
        if self.override is not None:
            where = f"command line, {self.override}" if self.path else "command line"
        else:
            place = self.mark or ()
            where = ":".join(map(str, (self.file, *(place[:1] if self.path else place))))  # a column of what is no YAML
        return f"{where}: {dotted(self.path)}: {self.message}" if self.path else f"{where}: {self.message}"


class ConfigError(InvalidManifest):
    """Everything that is wrong with a configuration; each line reads ``file:line: key: message``."""

    def __init__(self, *faults: ConfigFault) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageFault(message, hint="python driver.py --config experiment.yaml key=value ...")


def load_expr_config(argv: Sequence[str], cls: type[T]) -> tuple[T, str]:
    """``--config FILE`` and overrides (``key=value``, ``+key=value``, ``~key``) -> (configuration, file). Without a
    file the overrides are all there is, and the file is "". A leading ``*.py`` is dropped, so ``sys.argv`` will do.
    Raises ConfigError, NotFound, UsageFault."""
    tell_plainly()
    words = list(argv[1:] if argv and argv[0].endswith(".py") else argv)
    parser = _Parser(prog="driver", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args(words)
    if not given.config and not given.overrides:
        parser.error("nothing is configured: --config FILE, or key=value")
    return load_config(given.config, given.overrides, cls), given.config


def load_config(file: str, overrides: Sequence[str], cls: type[T]) -> T:
    """Raises ConfigError with every fault, NotFound for a file that is not there."""
    source, said, refused = _read(file), dict[Path, str](), list[ConfigFault]()
    with _positioned(source, said, cls):
        tree = _merged(source, overrides, cls, said, refused)
    faults = Faults()
    given = _hoisted(tree)
    config = build(cls, given, faults)
    if (contradictions := getattr(config, "contradictions", None)) is not None:
        faults.found += contradictions(given)
    if config is None or faults.found or refused:
        raise ConfigError(*refused, *(source.fault(path, message, said) for path, message in faults.found))
    for path, mark in faults.inert:
        _log.warning("%s", source.fault(path, f"has no effect: {mark.why}", said))
    for path, why in config.ineffective(given) if isinstance(config, BaseExperimentConfig) else ():
        _log.warning("%s", source.fault(path, f"has no effect: {why}", said))
    return config


@dataclass(frozen=True)
class _Source:
    file: str
    text: str
    marks: dict[Path, tuple[int, int]]

    def fault(self, path: Path, message: str, said: dict[Path, str]) -> ConfigFault:
        """``said``: the override that set a key, by its path."""
        for length in range(len(path), 0, -1):
            for key in _places(path[:length]):
                if (override := said.get(key)) is not None:
                    return ConfigFault(path, message, override=override)
        mark = next((self.marks[each] for each in _places(path) if each in self.marks), mark_of(path, self.marks))
        return ConfigFault(path, message, self.file, mark)


def _places(path: Path) -> list[Path]:
    """Where a key may have been said: also below ``trainer.grpo``, as AReaL-lite has it."""
    return [path, *(("trainer", name, *path) for name in TRAINERS)] if path else []


def _read(file: str) -> _Source:
    if not file:
        return _Source("configuration", "", {})
    try:
        text = FilePath(file).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFound(f"there is no configuration file {file}", hint="--config names it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(ConfigFault((), f"cannot be read: {error}", file)) from error
    try:
        return _Source(file, text, key_marks(text))
    except yaml.YAMLError as error:
        raise _yaml_fault(file, error) from error


def _yaml_fault(file: str, error: yaml.YAMLError) -> ConfigError:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = (mark.line + 1, mark.column + 1) if mark is not None else None
    return ConfigError(ConfigFault((), str(problem or error), file, place))


@contextlib.contextmanager
def _positioned(source: _Source, said: dict[Path, str], cls: type) -> Iterator[None]:
    """OmegaConf's errors, and those of overrides, with their place."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except yaml.YAMLError as error:  # OmegaConf reads more strictly: a key given twice
        raise _yaml_fault(source.file, error) from error
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "")
        path: Path = tuple(int(part) if part.isdecimal() else part for part in _parts(key))
        message = str(getattr(error, "msg", None) or error).splitlines()[0]
        if (missing := _MISSING.search(message)) is not None:
            message += suggestion(cls, tuple(_parts(missing[1])))
        raise ConfigError(source.fault(path, message, said)) from error


_MISSING = re.compile(r"Interpolation key '(.+?)' not found")


def _parts(key: str) -> list[str]:
    """``a.b[0].c`` -> a, b, 0, c."""
    return [part for part in key.replace("[", ".").replace("]", "").split(".") if part]


def _merged(
    source: _Source, overrides: Sequence[str], cls: type, said: dict[Path, str], refused: list[ConfigFault]
) -> dict[str, Any]:
    """The file with the overrides, interpolations resolved. Into ``said`` goes which override set what, into
    ``refused`` what is wrong with overrides."""
    from omegaconf import DictConfig, OmegaConf

    loaded = OmegaConf.create(source.text) if source.text.strip() else OmegaConf.create({})
    if not isinstance(loaded, DictConfig):
        raise ConfigError(ConfigFault((), "must be a map of keys", source.file, (1, 1)))
    tree: Any = OmegaConf.to_container(loaded, resolve=False)
    for text in overrides:
        try:
            _apply_override(tree, text, cls, said)
        except BadOverride as error:
            refused.append(ConfigFault((), str(error), override=text))
    with_defaults = OmegaConf.create(over(_defaults(cls), tree))
    resolved: dict[str, Any] = _given(tree, OmegaConf.to_container(with_defaults, resolve=True))
    return resolved


def _apply_override(tree: Any, text: str, cls: type, said: dict[Path, str]) -> None:
    """Raises BadOverride."""
    override = parse_override(text)
    value = _value(override.value)
    if override.op == "~":
        try:
            take_out(tree, override.path, value, only_this=override.value is not None)
        except BadOverride as error:
            raise BadOverride(f"{error}{suggestion(cls, override.path)}") from error
        return
    if override.op == "" and not _known(tree, override.path) and not is_declared(cls, override.path):
        near = suggestion(cls, override.path)
        raise BadOverride(f"{text}: there is no key {dotted(override.path)}{near}; +{text} would add it")
    place(tree, override.path, value)
    said[override.path] = text


def _defaults(cls: type) -> dict[str, Any]:
    """What an interpolation may name beside what the file says."""
    try:
        defaults = cls()
    except TypeError:  # a class of the driver's own that has no default for everything
        return {}
    plain: dict[str, Any] = _plain(dataclasses.asdict(defaults))
    return plain


def _plain(value: Any) -> Any:
    """As a YAML file would have it, whatever types the fields of a driver's own class are."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _given(tree: Any, resolved: Any) -> Any:
    """Of ``resolved``, what ``tree`` has."""
    if isinstance(tree, dict):
        return {str(key): _given(value, resolved[key]) for key, value in tree.items()}
    return resolved


def _value(text: str | None) -> Any:
    """As YAML in OmegaConf's dialect, where 1e-5 is a number."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not text:
        return "" if text == "" else None
    if "\n" in text or text.startswith(("%", "@", "`")):
        return text
    try:
        return OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)["value"]  # type: ignore[index, call-overload]
    except (yaml.YAMLError, OmegaConfBaseException) as error:  # the second: of an interpolation
        raise BadOverride(f"the value {text!r} is no YAML: quote it") from error


def _known(tree: Any, path: Path) -> bool:
    for part in path:
        if isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        elif isinstance(tree, dict) and str(part) in tree:
            tree = tree[str(part)]
        else:
            return False
    return True


def _hoisted(tree: dict[str, Any]) -> dict[str, Any]:
    """``trainer.grpo.actor...`` as AReaL-lite nests it, where it is now: at the top."""
    trainer = tree.get("trainer")
    if not isinstance(trainer, dict):
        return tree
    found = {**tree, "trainer": {key: value for key, value in trainer.items() if key not in TRAINERS}}
    for name in TRAINERS:
        if isinstance(trainer.get(name), dict):
            found = over(found, trainer[name])
    return found
