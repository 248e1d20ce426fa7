"""A conversion in progress: the result for each key, and the TrainJob and files that are written.

The methods of ``Draft`` set what every framework has: names, layout, adapters, optimizers and rewards. The arguments
are the framework's own keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from areal.dataclasses import dataclass, field
from areal.resources.backend import BackendError, parse_backend
from areal.resources.tree import set_path


class Fate(StrEnum):
    MAPPED = "mapped"
    IGNORED = "ignored"
    LOSSY = "lossy"
    REFUSED = "refused"


@dataclass(frozen=True)
class Entry:
    """The result for one key of the source. ``target``: the key of areal. ``note``: the reason, or the difference."""

    key: str
    value: Any
    fate: Fate
    target: str = ""
    note: str = ""


@dataclass
class Draft:
    """A conversion in progress. ``values``: the keys of the source with the framework's defaults. ``backend``: that of
    the Model that samples; "" if none samples. ``command``: the program that a script runs, and its lines."""

    values: Mapping[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    engine_args: dict[str, object] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    backend: str = ""
    model: str = ""
    command: str = ""

    def set(self, target: str, value: Any) -> None:
        self.config = set_path(self.config, tuple(target.split(".")), value)

    def mark(self, key: str, fate: Fate, note: str, target: str = "") -> None:
        """Replace the entry of ``key``, or add one for a default of the source. A refused key stays refused."""
        if any(each.key == key and each.fate is Fate.REFUSED for each in self.entries):
            return
        self.entries = [each for each in self.entries if each.key != key]
        self.entries.append(Entry(key, self.values.get(key), fate, target, note))

    def number(self, key: str) -> int:
        return int(self.values[key])

    def is_given(self, key: str) -> bool:
        return any(each.key == key for each in self.entries)

    def name_run(self) -> None:
        """Convert the experiment's and the trial's name to text: YAML may have read a number."""
        for name in ("experiment_name", "trial_name"):
            self.set(name, str(self.config[name]))

    def adapt(self, rank: str, alpha: str, modules: str) -> None:
        """Train LoRA adapters. The arguments are the source's keys of the rank, of alpha and of the target modules."""
        found = self.values.get(modules) or "all-linear"
        self.set("actor.use_lora", True)
        self.set("actor.lora_rank", self.number(rank))
        self.set("actor.lora_alpha", self.number(alpha))
        self.set("actor.target_modules", list(found) if isinstance(found, list) else [str(found)])

    def adam(self, betas: Any, least: Any = None, rate: Any = None, target: str = "actor.optimizer") -> None:
        """Set the betas of the optimizer, and its lowest learning rate ``least`` as a share of ``rate``."""
        if isinstance(betas, list | tuple) and len(betas) == 2:
            self.set(f"{target}.beta1", betas[0])
            self.set(f"{target}.beta2", betas[1])
        if least and rate:
            self.set(f"{target}.min_lr_ratio", min(1.0, round(float(least) / float(rate), 9)))

    def ask_for_version(self, earlier: Mapping[str, str], *, is_older: bool) -> None:
        """If the file has keys of an older version (``is_older``), mark the keys that it leaves to defaults which have
        changed since. ``earlier``: the note about the earlier default of each key."""
        for key, was in earlier.items() if is_older else ():
            if not self.is_given(key):
                taken = f"taken as {self.values[key]}, set it; " if key in self.values else ""
                self.mark(key, Fate.LOSSY, f"it is not given: {taken}{was}")

    def drop_critic(self, estimator: str, *fates: Fate) -> None:
        """Remove the critic, because ``estimator`` has none. Its entries with one of ``fates`` become ignored."""
        self.config.pop("critic", None)
        for each in self.entries:
            if each.key.startswith("critic.") and each.fate in fates:
                self.mark(each.key, Fate.IGNORED, f"{estimator} has no critic")

    def keep_rewards(self) -> None:
        """Do not clip rewards: the default of ``actor.reward_clip`` is 20."""
        self.set("actor.reward_clip", 1e9)

    def clip_rewards(self, key: str) -> None:
        """Set ``actor.reward_clip`` from the two bounds of ``key``. Bounds that are not symmetric are refused."""
        low, high = self.values[key]
        if high == -low > 0:
            self.set("actor.reward_clip", float(high))
        else:
            self.mark(key, Fate.REFUSED, "the range is symmetric here")

    def serve(self, gpus: int, tensor: int = 1, engine: str = "vllm") -> None:
        """Set the backend of the Model: replicas of ``tensor`` GPUs, or one replica if there are fewer GPUs."""
        tensor = min(tensor, gpus)
        self.backend = f"{engine}:d{gpus // tensor}" + (f"t{tensor}" if tensor > 1 else "")

    def lay_out(self, gpus: int, tensor: int = 1, engine: str = "vllm") -> int:
        """Divide the GPUs: half of them serve, and the other half trains with FSDP. A single GPU does both. Return the
        number of GPUs that train."""
        serving = max(1, gpus // 2)
        self.serve(serving, tensor, engine)
        training = max(1, gpus - serving)
        self.train_on(training)
        return training

    def train_on(self, gpus: int, backend: str = "") -> None:
        """Set the layout of all trained models: ``backend``, or FSDP over ``gpus``, which a critic always has."""
        for part in ("actor", "critic", "ref"):
            if part in self.config:
                self.set(f"{part}.backend", backend if backend and part != "critic" else f"fsdp:d{gpus}")

    def megatron(self, sizes: Mapping[str, int], gpus: int, key: str) -> str:
        """Return the layout of Megatron with these sizes by letter. If it is not supported, mark ``key`` and drop the
        experts' sizes."""
        replicas = max(1, gpus // (sizes["t"] * sizes["p"] * sizes["c"]))
        layout = "".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1)
        backend = f"megatron:d{replicas}{layout}"
        try:
            parse_backend(backend)
        except BackendError as error:
            self.mark(key, Fate.LOSSY, f"{backend}: {error.message}")
            return f"megatron:d{replicas}" + layout.partition("e")[0]
        return backend

    def engine_flags(self, engine: str, *keys: str) -> None:
        """Set the engine's flags for memory, context length, concurrent requests, eager mode and precision from the
        source's ``keys``, which are in this order ("" for a key that the source does not have)."""
        for key, flag in zip(keys, _SERVED.get(engine, ()), strict=False):
            if key and (value := self.values.get(key)) not in (None, False):
                self.engine_args[flag] = value
                if self.is_given(key):
                    self.mark(key, Fate.MAPPED, "", f"Model engineArgs.{flag}")

    def without_warm_up(self, schedule: str, *keys: str, target: str = "actor.optimizer") -> None:
        """Set no warm-up for the schedule ``constant``: transformers warms up only with ``constant_with_warmup``."""
        if str(self.values[schedule]) == "constant":
            self.set(f"{target}.warmup_steps_proportion", 0.0)
            for key in keys:
                if self.is_given(key):
                    self.mark(key, Fate.IGNORED, f"{schedule} constant has no warm-up")

    def warm_up(self, key: str, total: Any, target: str = "actor.optimizer") -> None:
        """Convert a warm-up of as many steps as ``key`` says to a share of the ``total`` steps (None: not known)."""
        steps, target = self.values.get(key), f"{target}.warmup_steps_proportion"
        if steps is None or int(steps) <= 0:
            return
        if total:
            self.set(target, round(min(1.0, int(steps) / int(total)), 6))
            self.mark(key, Fate.MAPPED, f"{steps} of {total} steps", target)
        else:
            self.mark(key, Fate.LOSSY, "the warm-up is a share of the steps here, and their number is not given")

    def divided(self, key: str, whole_batch: int, part: int, unit: str, model: str = "actor") -> None:
        """Set ``ppo_n_minibatches`` of a model from the sizes of a step and of an update, counted in ``unit``. Sizes
        that do not divide are refused."""
        if part < 1 or whole_batch % part:
            self.mark(key, Fate.REFUSED, f"minibatches of {part} {unit} do not divide a step of {whole_batch}")
            return
        self.set(f"{model}.ppo_n_minibatches", whole_batch // part)
        note = f"{whole_batch} {unit} of a step in minibatches of {part}"
        if self.is_given(key):
            self.mark(key, Fate.MAPPED, note, f"{model}.ppo_n_minibatches")

    def bound_micro_batches(self, longest: Any, rows: Mapping[str, Any]) -> None:
        """Limit the tokens of a micro-batch to those of the source's: ``rows`` of each model, with ``longest`` tokens
        each. Without a limit a whole minibatch is one micro-batch, which no GPU may hold."""
        for model, count in rows.items():
            if model in self.config and "mb_spec" not in self.config[model]:
                count = count if isinstance(count, int) and count > 0 else 1
                self.set(f"{model}.mb_spec.max_tokens_per_mb", count * int(longest))

    def validate(self) -> None:
        """Complete the data set of evaluations from the training data set. Without one, remove its settings."""
        if "valid_dataset" in self.config:
            train = self.config["train_dataset"]
            shared = {name: train[name] for name in ("type", "max_length", "batch_size", "train_on") if name in train}
            if train["type"] == "rl":
                shared.pop("max_length", None)
            self.set("valid_dataset", {**shared, **self.config["valid_dataset"]})
        else:
            for each in self.entries:
                if each.fate is Fate.MAPPED and each.target.startswith(_OF_EVALUATION):
                    self.mark(each.key, Fate.IGNORED, "no data set is evaluated")
            for name in _OF_EVALUATION:
                self.config.pop(name, None)

    def save_and_resume(self, every: int | None) -> None:
        """Write checkpoints for recovery as often as models are saved, which is ``every`` so many steps."""
        if self.config.get("recover", {}).get("mode") == "auto" and every:
            self.set("recover.freq_steps", every)

    def write_rewards(self, what: str, imports: str, functions: Mapping[str, str], path: str = "") -> None:
        """Write ``reward.py`` with a function for each name. A body may use ``prompt``, ``completions`` and the row's
        columns (``data``), and the module of the file ``path`` as ``_MODULE``."""
        parts = [each.strip() for each in (imports, _OWN.format(path=path) if path else "") if each.strip()]
        made = [
            _FUNCTION.format(
                name=name, body="\n".join(f"    {line}" if line else "" for line in body.strip().splitlines())
            )
            for name, body in functions.items()
        ]
        head = "\n".join(parts)
        self.files["reward.py"] = _REWARDS.format(
            what=what, imports=f"{head}\n\n" if head else "", functions="\n".join(made)
        )
        names = [f"reward:{name}" for name in functions]
        self.set("reward_fn", names if len(names) > 1 else names[0])

    def pick_columns(self, columns: Mapping[str, object], key: str, system: str = "") -> None:
        """Write ``rows.py`` if the data set has other column names than areal reads, or prompts get a system message.
        ``columns``: the source's name (with dots for a value within an object) by areal's. ``key``: the entry that
        gets the note."""
        wanted = {ours: str(theirs) for ours, theirs in columns.items() if theirs}
        if not system and all(theirs in _READ.get(ours, (ours,)) for ours, theirs in wanted.items()):
            return
        paths = {part: self.config.get(part, {}).get("path") for part in ("train_dataset", "valid_dataset")}
        self.files["rows.py"] = _ROWS.format(
            train=paths["train_dataset"], valid=paths["valid_dataset"], columns=wanted, system=system
        )
        for part, path in paths.items():
            if path:
                self.set(f"{part}.path", f"rows:{part.partition('_')[0]}")
        listed = ", ".join(f"{theirs} is {ours}" for ours, theirs in wanted.items())
        self.mark(key, Fate.MAPPED, f"rows.py: {listed}", "train_dataset.path")


_SERVED = {
    "vllm": ("gpu-memory-utilization", "max-model-len", "max-num-seqs", "enforce-eager", "dtype"),
    "sglang": ("mem-fraction-static", "context-length", "max-running-requests", "disable-cuda-graph", "dtype"),
}


_OF_EVALUATION = ("eval_gconfig", "evaluator")


_REWARDS = '''"""The reward of the converted run: {what}."""

from __future__ import annotations

from typing import Any

{imports}{functions}'''
_FUNCTION = """
def {name}(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
{body}
"""
_OWN = """import importlib.util

_SPEC = importlib.util.spec_from_file_location("converted_reward", {path!r})
assert _SPEC is not None and _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
"""


_ROWS = '''"""The rows of the converted run, with the names of columns that are read here."""

from __future__ import annotations

from typing import Any

from areal.dataset.loading import columns_named

TRAIN = {train!r}
VALID = {valid!r}
COLUMNS = {columns!r}
SYSTEM = {system!r}


def train(split: str, dataset_config: Any, tokenizer: Any) -> Any:
    return columns_named(COLUMNS, TRAIN, split, dataset_config, tokenizer, SYSTEM)


def valid(split: str, dataset_config: Any, tokenizer: Any) -> Any:
    return columns_named(COLUMNS, VALID, split, dataset_config, tokenizer, SYSTEM)
'''


# Columns that areal reads first: a row may have `messages` or `prompt` beside the `problem` that the source names.
_READ = {"prompt": ("messages", "prompt"), "response": ("response",)}
