"""The rules for the keys of another framework, and the conversion by a table of them.

A key is *mapped* to a key of areal with the same meaning, *ignored* if it does not change what the model learns,
*lossy* if it does and areal has no counterpart, or *refused* if the converted job would be a different one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from areal.convert.drafts import Draft, Entry, Fate
from areal.convert.reading import with_dollars
from areal.dataclasses import dataclass, field, replace
from areal.errors import closest

_NAMES = ("experiment_name", "trial_name", "stats_logger")  # they do not change what the model learns
_UNSET = re.compile(r"\$\{?(\w+)")
_INTERPOLATED = re.compile(r"\$\{(?:[\w.]*\.[\w.]*|[\w.]+:(?![-=+?\d])[^}]*)\}")  # of OmegaConf
_OUTPUT = re.compile(r"\$\(|^`.*`$")
Translate = Callable[[Any], Any]


class NotLiteral(str):
    """The text of an expression that only the running script can evaluate. ``note``: its position and what to do."""

    note: str

    def __new__(cls, text: str, note: str) -> NotLiteral:
        made = super().__new__(cls, text)
        made.note = note
        return made


@dataclass(frozen=True)
class Rule:
    """The rule for a key of the source. ``target``: the key of areal, which ``convert`` sets, or ``Framework.finish``
    if it ``is_joint``. ``neutral``: values that have no effect, so that the key is ignored. ``translate`` raises
    ValueError for a value without a counterpart."""

    fate: Fate
    target: str = ""
    note: str = ""
    translate: Translate | None = None
    neutral: tuple[Any, ...] = ()
    is_joint: bool = False

    def entry(self, key: str, value: Any) -> tuple[Entry, Any]:
        """Return the entry of a key with this value, and the value of its target."""
        if value in self.neutral:
            return Entry(key, value, Fate.IGNORED, note="it asks for nothing"), None
        if self.fate is not Fate.MAPPED or self.translate is None:
            return Entry(key, value, self.fate, self.target, self.note), value
        try:
            return Entry(key, value, self.fate, self.target, self.note), self.translate(value)
        except (ValueError, KeyError, TypeError) as error:
            why = str(error) if isinstance(error, ValueError) else f"{value!r} has no counterpart"
            return Entry(key, value, Fate.REFUSED, note=why), None


def to(target: str, translate: Translate | None = None, note: str = "", neutral: tuple[Any, ...] = ()) -> Rule:
    """Return a rule that maps a key to ``target``."""
    return Rule(Fate.MAPPED, target, note, translate, neutral)


def joint(target: str, translate: Translate | None = None, note: str = "", neutral: tuple[Any, ...] = ()) -> Rule:
    """Return the rule of a key whose target ``Framework.finish`` sets, together with other keys."""
    return replace(to(target, translate, note, neutral), is_joint=True)


def ignored(note: str) -> Rule:
    """Return the rule of a key that does not change what the model learns."""
    return Rule(Fate.IGNORED, note=note)


def lossy(note: str, *neutral: Any) -> Rule:
    """Return the rule of a key without a counterpart. ``neutral`` values have no effect."""
    return Rule(Fate.LOSSY, note=note, neutral=(None, *neutral))


def refused(note: str, *neutral: Any) -> Rule:
    """Return the rule of a key that makes the job a different one. ``neutral`` values have no effect."""
    return Rule(Fate.REFUSED, note=note, neutral=(None, *neutral))


def alike(rule: Rule, keys: str, prefix: str = "") -> dict[str, Rule]:
    """Return one rule for several ``keys``, separated by spaces, of the section ``prefix``."""
    return {f"{prefix}.{key}" if prefix else key: rule for key in keys.split()}


@dataclass(frozen=True)
class Framework:
    """One trainer of a framework. ``rules``: by key; a name that ends with ``.*`` applies to a whole section.
    ``defaults``: those of the framework, for the keys that have an effect. ``finish``: sets what depends on several
    keys. ``aliases``: the present name of an older key, or several, separated by spaces. ``switches``: by the prefix of
    keys, the key that enables them; if it is false, keys without a rule of their own are ignored."""

    name: str
    rules: Mapping[str, Rule]
    defaults: Mapping[str, object]
    finish: Callable[[Draft], None]
    aliases: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)

    def rule(self, key: str, values: Mapping[str, object]) -> Rule:
        if key in self.rules:
            return self.rules[key]
        if key.startswith("~"):
            rule = self.rule(key[1:], values)
            return rule if rule.fate is Fate.IGNORED else refused("it deletes a key, whose default is taken here")
        switch = next((each for each in self.switches if key.startswith(each)), None)
        if switch is not None and not values.get(self.switches[switch]):
            return ignored(f"{self.switches[switch]} is off")
        parts = key.split(".")
        if parts[-1] == "_target_":
            return ignored("Hydra's name of a class")
        for count in range(len(parts) - 1, 0, -1):
            if (found := self.rules.get(".".join(parts[:count]) + ".*")) is not None:
                return found
        above, _, last = key.rpartition(".")
        beside = {each.rpartition(".")[2]: each for each in self.rules if each.rpartition(".")[0] == above}
        near = closest(last, beside)
        suggestion = f' (did you mean "{beside[near]}"?)' if near else ""
        return refused(f"this is not a known key of {self.name}{suggestion}")


def convert(source: Framework, given: Mapping[str, object]) -> Draft:
    """Convert ``given``, the values of the source by dotted keys. The framework's defaults are converted too, without
    an entry, because they are part of what its users run. The default replaces a refused value."""
    entries, targets, unusable = [], dict[str, object](), set[str]()
    older = {name: key for key in given if key in source.aliases for name in source.aliases[key].split()}
    named: dict[str, object] = {}
    for key, value in given.items():
        for name in source.aliases.get(key, key).split():
            if value is not None or name not in named:  # null does not override the value of another name
                named[name] = value
    written, given = named, {key: with_dollars(value) for key, value in named.items()}
    values = {**source.defaults, **given}
    for key, value in values.items():
        rule = source.rule(key, values)
        if isinstance(value, NotLiteral) and rule.fate in (Fate.MAPPED, Fate.REFUSED):
            fate = Fate.IGNORED if rule.target.startswith(_NAMES) else Fate.REFUSED
            entries.append(Entry(key, str(value), fate, note=value.note))
            unusable.add(key)
            continue
        entry, target_value = rule.entry(key, value)
        unwanted = value in rule.neutral
        if (
            rule.fate is Fate.MAPPED
            and not unwanted
            and (why := _fault(key, written.get(key, value), source.defaults.get(key)))
        ):
            entry = Entry(key, value, Fate.IGNORED if rule.target.startswith(_NAMES) else Fate.REFUSED, note=why)
        if key in given:
            entries.append(entry)
        if rule.fate is Fate.MAPPED and not unwanted and entry.fate is not Fate.MAPPED:
            unusable.add(key)
        elif entry.fate is Fate.MAPPED and not rule.is_joint and target_value is not None:
            targets[entry.target] = target_value
    draft = Draft({**source.defaults, **{key: value for key, value in given.items() if key not in unusable}})
    for key in source.defaults.keys() & unusable:
        rule = source.rule(key, values)
        if not rule.is_joint and (value := rule.entry(key, source.defaults[key])[1]) is not None:
            targets[rule.target] = value
    draft.entries = entries
    for target, value in targets.items():
        draft.set(target, value)
    source.finish(draft)
    for model in (draft.config.get(name, {}) for name in ("actor", "critic")):
        if "optimizer" in model:  # areal's default is a thousandth of the steps
            model["optimizer"].setdefault("warmup_steps_proportion", 0.0)
    if draft.config.get("total_train_steps") is not None:
        draft.config.pop("total_train_epochs", None)
        for each in [each for each in draft.entries if each.target == "total_train_epochs"]:
            draft.mark(each.key, Fate.IGNORED, "the number of steps is given")
    order = {key: place for place, key in enumerate(given)}
    draft.entries.sort(key=lambda each: order.get(each.key, len(order)))
    draft.entries = [replace(each, key=older.get(each.key, each.key)) for each in draft.entries]
    return draft


def _fault(key: str, value: Any, default: Any) -> str:
    """Return why the value cannot be used, or ""."""
    if isinstance(value, str) and (unresolved := _INTERPOLATED.search(value)) is not None:
        return f"{unresolved[0]} is not resolved here: add {key}=VALUE"
    if isinstance(value, str) and (unset := _UNSET.search(value)) is not None:
        if unset[1].isdigit():
            return f"it is argument {unset[1]} of the script: add {key}=VALUE"
        return f"${unset[1]} is not set: export it, or add {key}=VALUE"
    if isinstance(value, str) and _OUTPUT.search(value):
        return f"it is what a command prints: add {key}=VALUE"
    if value is None and default is not None:
        return f"it must not be null; its default is {default!r}"
    if isinstance(default, bool) and not isinstance(value, bool):
        return f"it must be true or false, not {value!r}"
    if isinstance(default, int | float) and not isinstance(default, bool):
        return "" if _is_number(value) else f"it must be a number, not {value!r}"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any) -> float:
    """Return a finite number. Raises ValueError."""
    if not _is_number(value):
        raise ValueError(f"it must be a number, not {value!r}")
    return float(value) if isinstance(value, float) else int(value)


def pair(value: Any) -> list[float]:
    """Return a list of two numbers. Raises ValueError."""
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(_is_number, value)):
        raise ValueError(f"it must be two numbers, not {value!r}")
    return list(value)


def whole(least: int) -> Translate:
    """Return a translation of whole numbers that are at least ``least``."""

    def translate(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"it must be a whole number from {least} on, not {value!r}")
        return value

    return translate


def optional(value: Any) -> int | None:
    return None if value is None else whole(-1)(value)


def period(value: Any) -> int | None:
    """Return a number of steps; None for -1, 0 and null, which mean never."""
    return None if value is None or whole(-1)(value) < 1 else value


def choice(**choices: Any) -> Translate:
    """Return a translation of names to the values of ``choices``."""

    def translate(value: Any) -> Any:
        name = "no" if value is False and "no" in choices else str(value)  # YAML reads `no` as false
        if name not in choices:
            raise ValueError(f"{value!r} has no counterpart; these have: {', '.join(choices)}")
        return choices[name]

    return translate


def files(value: Any) -> Any:
    """Return one data set, or a list of data sets that are read one after the other. Raises ValueError."""
    names = value.split(",") if isinstance(value, str) else list(value)
    if not names or not all(isinstance(each, str) and each.strip() for each in names):
        raise ValueError(f"it names no data set: {value!r}")
    return names[0].strip() if len(names) == 1 else [each.strip() for each in names]


SPEED = ignored("it changes speed or memory, not the result")
REPORT = ignored("it changes what is reported, not the result")
PACKED = ignored("rows are packed always")
OFFLOAD = ignored("weights and optimizer stay on the GPU")
FOLDER = ignored("a job has a folder of its own")
NO_CODE = refused("code of a model's folder does not run", False)
SCHEDULE = choice(
    cosine_with_min_lr="cosine", cosine="cosine", linear="linear", constant="constant", constant_with_warmup="constant"
)
KLS = choice(kl="k1", k1="k1", mse="k2", k2="k2", low_var_kl="k3", k3="k3")
