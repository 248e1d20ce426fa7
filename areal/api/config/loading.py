"""``load_expr_config``: loads a driver's configuration from a YAML file and the command line.

``key=value`` sets a key that the file or the configuration class has; ``+key=value`` (or ``++``) sets any key; ``~key``
removes a key of the file (``areal.resources.tree``).

Nothing is written. The only global that is set is ``sys.excepthook``: ``python driver.py`` reports errors that users
can fix in one line with a hint, and exits with the status of the error, as the command line and jobs do. An interrupt
is reported in one line. All other errors keep their traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path as FilePath
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar

import yaml

from areal.api.config.experiment import BaseExperimentConfig, PPOConfig
from areal.api.config.fields import build
from areal.errors import ArealError, InvalidManifest, NotFound, UsageFault, closest
from areal.interrupt import STATUS, is_interrupt
from areal.resources.tree import (
    TRAINERS,
    BadOverride,
    FieldPath,
    apply_override,
    dotted,
    lifted,
    merge_values,
    parse_override,
)
from areal.wire.fields import Faults, hints_of

Mark = tuple[int, int]
"""Line and column, counted from 1."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


def key_marks(text: str) -> dict[FieldPath, Mark]:
    """Return the positions of all keys and list items in a YAML text. Raises yaml.YAMLError."""
    marks: dict[FieldPath, Mark] = {}
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None:
        _walk(root, (), marks)
    return marks


def _walk(node: yaml.Node, path: FieldPath, marks: dict[FieldPath, Mark]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            at = (*path, str(key.value))
            marks[at] = key.start_mark.line + 1, key.start_mark.column + 1
            _walk(value, at, marks)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            marks[(*path, number)] = item.start_mark.line + 1, item.start_mark.column + 1
            _walk(item, (*path, number), marks)


def _undeclared(cls: type, path: FieldPath) -> tuple[type, FieldPath] | None:
    """Return the first undeclared part of ``path``: the class that lacks it (``str`` below a plain value), and the path
    up to it. None if all parts are declared."""
    if path[0] == "trainer" and len(path) > 2 and path[1] in TRAINERS:
        path = path[2:]
    for depth, part in enumerate(path):
        hints = hints_of(cls)
        if part not in hints:
            return cls, path[: depth + 1]
        nested = [kind for kind in _kinds(hints[part]) if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
        if not nested or typing.get_origin(hints[part]) is list:
            rest = path[depth + 1 : depth + 2]
            return None if not rest or _is_open(hints[part]) else (str, path[: depth + 2])
        cls = nested[0]
    return None


def _kinds(hint: Any) -> Iterator[Any]:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        arguments = arguments[:1]
    yield hint
    for argument in arguments:
        yield from _kinds(argument)


def _is_open(hint: Any) -> bool:
    """Return whether a value of this type may have any key."""
    kinds = list(_kinds(hint))
    return Any in kinds or any(
        typing.get_origin(kind) in (list, dict) or (isinstance(kind, type) and issubclass(kind, dict)) for kind in kinds
    )


def suggestion(cls: type | None, path: FieldPath) -> str:
    """Return the text `` (did you mean "a.b"?)`` for an undeclared path, "" without a similar one."""
    lacking = _undeclared(cls, path) if cls is not None else None
    if lacking is None or lacking[0] is str:
        return ""
    near = closest(str(lacking[1][-1]), hints_of(lacking[0]))
    return f' (did you mean "{dotted((*lacking[1][:-1], near))}"?)' if near is not None else ""


def error_text(error: ArealError) -> str:
    return f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else "")


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if is_interrupt(error):
        sys.stderr.write("interrupted\n")
        sys.exit(STATUS)
    if not isinstance(error, ArealError):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(error_text(error))
    sys.exit(error.exit_code)  # within the hook, it sets the exit status of the interpreter


_Kind = Literal["fault", "no effect", "caution"]


@dataclass(frozen=True)
class ConfigFault:
    """A fault in a configuration, a key without effect, or a value that is rarely wanted. ``override``: the override
    that set the key, if there is one. ``mark``: line and column in the file, from 1; None if it has no such key."""

    path: FieldPath
    message: str
    file: str = ""
    mark: tuple[int, int] | None = None
    override: str | None = None
    kind: _Kind = "fault"

    def __str__(self) -> str:
        message = f"has no effect: {self.message}" if self.kind == "no effect" else self.message
        if self.override is not None:
            where = f"command line, {self.override}" if self.path else "command line"
        else:
            place = self.mark or ()
            where = ":".join(map(str, (self.file, *(place[:1] if self.path else place))))  # column only of bad YAML
        return f"{where}: {dotted(self.path)}: {message}" if self.path else f"{where}: {message}"


class ConfigError(InvalidManifest):
    """All faults of a configuration; each line reads ``file:line: key: message``."""

    def __init__(self, *faults: ConfigFault) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


class _DriverArguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageFault(message, hint="python driver.py --config experiment.yaml key=value ...")


def load_expr_config(argv: Sequence[str], cls: type[T]) -> tuple[T, str]:
    """Load a configuration from ``--config FILE`` and overrides (``key=value``, ``+key=value``, ``~key``). Returns
    (configuration, file). Without a file only the overrides are used, and the file is "". A first argument ``*.py`` is
    ignored, so that ``sys.argv`` can be passed. Raises ConfigError, NotFound, UsageFault."""
    if sys.excepthook is sys.__excepthook__:  # the process has no hook of its own
        sys.excepthook = _uncaught
    words = list(argv[1:] if argv and argv[0].endswith(".py") else argv)
    parser = _DriverArguments(prog="driver", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args(words)
    if not given.config and not given.overrides:
        parser.error("nothing is configured: --config FILE, or key=value")
    return load_config(given.config, given.overrides, cls), given.config


@dataclass(frozen=True)
class Examined:
    """A configuration (None if there are ``faults``), the ``values`` that it sets, and ``notes``: keys that have no
    effect, or an effect that is rarely wanted."""

    config: Any
    values: dict[str, Any]
    faults: tuple[ConfigFault, ...]
    notes: tuple[ConfigFault, ...]


def load_config(file: str, overrides: Sequence[str], cls: type[T]) -> T:
    """Load a configuration. Raises ConfigError with all faults, NotFound for a missing file."""
    found = examine(file, overrides, cls)
    if found.faults:
        raise ConfigError(*found.faults)
    for note in found.notes:
        _log.warning("%s", note)
    return found.config


def examine(
    file: str,
    overrides: Sequence[str],
    cls: type[T],
    more_faults: Callable[[T], Iterable[tuple[FieldPath, str]]] = lambda config: (),
) -> Examined:
    """Load a configuration and return it with all its faults and notes. ``more_faults`` checks a configuration that the
    class accepts. Raises ConfigError for a file that cannot be read, NotFound for a missing one."""
    source, set_by, refused = _read(file), dict[FieldPath, str](), list[ConfigFault]()
    given = _merged(source, overrides, cls, set_by, refused)
    faults = Faults()
    complete = getattr(cls, "completed", None)
    config = build(cls, given if complete is None else complete(given), faults)
    if (contradictions := getattr(config, "contradictions", None)) is not None:
        faults.found += contradictions(given)
    if config is not None and not faults.found and not refused:
        faults.found += more_faults(config)
    ineffective = faults.ineffective
    ineffective += config.ineffective(given) if isinstance(config, BaseExperimentConfig) else ()
    cautions = config.cautions(given) if isinstance(config, PPOConfig) else ()
    notes = [source.fault(path, why, set_by, "no effect") for path, why in ineffective]
    notes += [source.fault(tuple(path), why, set_by, "caution") for path, why in cautions]
    found = (*refused, *(source.fault(path, message, set_by) for path, message in faults.found))
    return Examined(config, given, found, tuple(notes))


def values_of(file: str, overrides: Sequence[str], cls: type | None) -> dict[str, Any]:
    """Return the values that a configuration sets, without faults: a reference that leads nowhere stays as it is
    written, and a malformed override is skipped. ``cls``: None if it is not known. Raises ConfigError, NotFound."""
    return _merged(_read(file), overrides, cls, {}, [], strict=False)


@dataclass(frozen=True)
class _ConfigFile:
    """A configuration file, and the positions of its keys."""

    file: str
    text: str
    marks: dict[FieldPath, tuple[int, int]]

    def fault(self, path: FieldPath, message: str, set_by: dict[FieldPath, str], kind: _Kind = "fault") -> ConfigFault:
        """Return a fault with its place: the override in ``set_by`` that set the key, else the position in the file."""
        enclosing = [path[:length] for length in range(len(path), 0, -1)]
        for key in (place for each in enclosing for place in _places(each)):
            if (override := set_by.get(key)) is not None:
                return ConfigFault(path, message, override=override, kind=kind)
        mark = next((self.marks[each] for each in (*_places(path), *enclosing) if each in self.marks), None)
        return ConfigFault(path, message, self.file, mark, kind=kind)


def _places(path: FieldPath) -> list[FieldPath]:
    """Return the paths at which a file may have a key: files of AReaL-lite nest it below ``trainer.grpo``."""
    return [path, *(("trainer", name, *path) for name in TRAINERS)] if path else []


def _read(file: str) -> _ConfigFile:
    if not file:
        return _ConfigFile("configuration", "", {})
    try:
        text = FilePath(file).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFound(f"there is no configuration file {file}", hint="--config names it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(ConfigFault((), f"cannot be read: {error}", file)) from error
    try:
        return _ConfigFile(file, text, key_marks(text))
    except yaml.YAMLError as error:
        raise _yaml_fault(file, error) from error


def _yaml_fault(file: str, error: yaml.YAMLError) -> ConfigError:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = (mark.line + 1, mark.column + 1) if mark is not None else None
    return ConfigError(ConfigFault((), str(problem or error), file, place))


@contextlib.contextmanager
def _positioned(source: _ConfigFile, set_by: dict[FieldPath, str], cls: type | None) -> Iterator[None]:
    """Convert errors of OmegaConf and YAML to ConfigError with their position."""
    from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

    try:
        yield
    except yaml.YAMLError as error:  # OmegaConf is stricter: it refuses duplicate keys
        raise _yaml_fault(source.file, error) from error
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "")
        path: FieldPath = tuple(int(part) if part.isdecimal() else part for part in _parts(key))
        message = str(getattr(error, "msg", None) or error).splitlines()[0]
        named = _REFERENCE.findall(str(error.child_node)) if isinstance(error, InterpolationKeyError) else ()
        message += next(filter(None, (suggestion(cls, tuple(_parts(each))) for each in named)), "")
        raise ConfigError(source.fault(path, message, set_by)) from error


_REFERENCE = re.compile(r"\$\{([^${}:]+)\}")  # of a value to another key


def _parts(key: str) -> list[str]:
    """Split an OmegaConf key: ``a.b[0].c`` -> a, b, 0, c."""
    return [part for part in key.replace("[", ".").replace("]", "").split(".") if part]


def _merged(
    source: _ConfigFile,
    overrides: Sequence[str],
    cls: type | None,
    set_by: dict[FieldPath, str],
    refused: list[ConfigFault],
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Return the file with overrides applied, keys at the top level, and interpolations resolved; unless ``strict``,
    those that fail stay as written. Adds the overrides by path to ``set_by``, and their faults to ``refused``."""
    from omegaconf import DictConfig, OmegaConf

    with _positioned(source, set_by, cls):
        loaded = OmegaConf.create(source.text) if source.text.strip() else OmegaConf.create({})
        if not isinstance(loaded, DictConfig):
            raise ConfigError(ConfigFault((), "must be a map of keys", source.file, (1, 1)))
        tree: Any = OmegaConf.to_container(loaded, resolve=False)
        for text in overrides:
            try:
                _apply_override(tree, text, cls, set_by)
            except BadOverride as error:
                refused.append(ConfigFault((), str(error), override=text))
        whole = OmegaConf.create(merge_values(_defaults(cls), tree))
        found = {str(key): _resolved(whole, key, value, strict) for key, value in tree.items()}
    return lifted(found, set_by)


def _resolved(node: Any, key: Any, written: Any, strict: bool) -> Any:
    """Return ``written``, the value of ``key`` in the OmegaConf container ``node``, with interpolations resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(written, dict):
        return {str(each): _resolved(node[key], each, value, strict) for each, value in written.items()}
    if isinstance(written, list):
        return [_resolved(node[key], at, value, strict) for at, value in enumerate(written)]
    if not isinstance(written, str) or "${" not in written:
        return written
    try:
        found = node[key]
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
    except OmegaConfBaseException:
        if strict:
            raise
        return written


def _apply_override(tree: Any, text: str, cls: type | None, set_by: dict[FieldPath, str]) -> None:
    """Apply one override to ``tree``. Raises BadOverride."""
    override = parse_override(text)
    value = _value(override.value)
    if override.op == "~":
        try:
            apply_override(tree, override, value)
        except BadOverride as error:
            raise BadOverride(f"{error}{suggestion(cls, override.path)}") from error
        return
    is_new = override.op == "" and not _known(tree, override.path)
    if is_new and cls is not None and _undeclared(cls, override.path) is not None:
        near = suggestion(cls, override.path)
        raise BadOverride(f"{text}: there is no key {dotted(override.path)}{near}")
    apply_override(tree, override, value)
    set_by.pop(override.path, None)  # in the order of the last ones
    set_by[override.path] = text


def _defaults(cls: type | None) -> dict[str, Any]:
    """Return the defaults of the class, which interpolations may refer to."""
    try:
        return _plain(dataclasses.asdict(cls())) if cls is not None else {}
    except TypeError:  # a driver's own class with required fields
        return {}


def _plain(value: Any) -> Any:
    """Return the value converted to YAML's types. Fields of a driver's own class may have any type."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _value(text: str | None) -> Any:
    """Parse the value of an override as YAML in OmegaConf's dialect, in which 1e-5 is a number."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not text:
        return "" if text == "" else None
    if "\n" in text or text.startswith(("%", "@", "`")):
        return text
    try:
        return OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)["value"]  # type: ignore[index, call-overload]
    except (yaml.YAMLError, OmegaConfBaseException) as error:  # OmegaConf's: for an interpolation
        raise BadOverride(f"the value {text!r} is no YAML: quote it") from error


def _known(tree: Any, path: FieldPath) -> bool:
    for part in path:
        if isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        elif isinstance(tree, dict) and str(part) in tree:
            tree = tree[str(part)]
        else:
            return False
    return True
