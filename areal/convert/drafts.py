"""A conversion that is being made: what becomes of each key, and what is written.

Names, layout, adapters, optimizers and rewards are alike in every framework; each sets them with its own keys.
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
    """A key of the source with its value. ``target``: our key. ``note``: why, or what differs."""

    key: str
    value: Any
    fate: Fate
    target: str = ""
    note: str = ""


@dataclass
class Draft:
    """A conversion that is being made. ``values``: the keys of the source, with the framework's defaults. ``backend``:
    of the Model that is sampled from; "" where nothing is sampled. ``command``: the program that was read in a script,
    and its lines."""

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
        """Replace the entry of ``key``, or add one for a default of the source. A refusal stays."""
        if any(each.key == key and each.fate is Fate.REFUSED for each in self.entries):
            return
        self.entries = [each for each in self.entries if each.key != key]
        self.entries.append(Entry(key, self.values.get(key), fate, target, note))

    def number(self, key: str) -> int:
        return int(self.values[key])

    def is_given(self, key: str) -> bool:
        return any(each.key == key for each in self.entries)

    def name_run(self) -> None:
        for name in ("experiment_name", "trial_name"):
            self.set(name, str(self.config[name]))

    def adapt(self, rank: str, alpha: str, modules: str) -> None:
        """LoRA, from the keys of its rank, alpha and modules."""
        found = self.values.get(modules) or "all-linear"
        self.set("actor.use_lora", True)
        self.set("actor.lora_rank", self.number(rank))
        self.set("actor.lora_alpha", self.number(alpha))
        self.set("actor.target_modules", list(found) if isinstance(found, list) else [str(found)])

    def adam(self, betas: Any, least: Any = None, rate: Any = None, target: str = "actor.optimizer") -> None:
        """Set the optimizer's betas, and its ``least`` learning rate as a share of ``rate``."""
        if isinstance(betas, list | tuple) and len(betas) == 2:
            self.set(f"{target}.beta1", betas[0])
            self.set(f"{target}.beta2", betas[1])
        if least and rate:
            self.set(f"{target}.min_lr_ratio", min(1.0, round(float(least) / float(rate), 9)))

    def ask_for_version(self, earlier: Mapping[str, str], *, is_older: bool) -> None:
        """Name the defaults that an older version, of which a file has keys, had otherwise: ``earlier``."""
        for key, was in earlier.items() if is_older else ():
            if not self.is_given(key):
                taken = f"taken as {self.values[key]}, set it; " if key in self.values else ""
                self.mark(key, Fate.LOSSY, f"it is not given: {taken}{was}")

    def drop_critic(self, estimator: str, *fates: Fate) -> None:
        """Leave out the critic, which ``estimator`` does not have, with its keys of these ``fates``."""
        self.config.pop("critic", None)
        for each in self.entries:
            if each.key.startswith("critic.") and each.fate in fates:
                self.mark(each.key, Fate.IGNORED, f"{estimator} has no critic")

    def keep_rewards(self) -> None:
        """Rewards are not clipped: ``actor.reward_clip`` is 20 by default."""
        self.set("actor.reward_clip", 1e9)

    def clip_rewards(self, key: str) -> None:
        """``actor.reward_clip``, from the two bounds of ``key``."""
        low, high = self.values[key]
        if high == -low > 0:
            self.set("actor.reward_clip", float(high))
        else:
            self.mark(key, Fate.REFUSED, "the range is symmetric here")

    def serve(self, gpus: int, tensor: int = 1, engine: str = "vllm") -> None:
        """Set the Model's backend: replicas of ``tensor`` GPUs each, or of all where there are fewer."""
        tensor = min(tensor, gpus)
        self.backend = f"{engine}:d{gpus // tensor}" + (f"t{tensor}" if tensor > 1 else "")

    def lay_out(self, gpus: int, tensor: int = 1, engine: str = "vllm") -> int:
        """Let half of the GPUs serve and half train, by fsdp; one GPU does both. Return how many train."""
        serving = max(1, gpus // 2)
        self.serve(serving, tensor, engine)
        training = max(1, gpus - serving)
        self.train_on(training)
        return training

    def train_on(self, gpus: int, backend: str = "") -> None:
        for part in ("actor", "critic", "ref"):
            if part in self.config:
                self.set(f"{part}.backend", backend if backend and part != "critic" else f"fsdp:d{gpus}")

    def megatron(self, sizes: Mapping[str, int], gpus: int, key: str) -> str:
        """``megatron:d..`` with these sizes by letter. ``key`` gets the fault of a size that is not supported."""
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
        """Set the engine's flags for memory, length, requests at once, eager mode and precision, from the source's
        ``keys`` in this order ("" for none)."""
        for key, flag in zip(keys, _SERVED.get(engine, ()), strict=False):
            if key and (value := self.values.get(key)) not in (None, False):
                self.engine_args[flag] = value
                if self.is_given(key):
                    self.mark(key, Fate.MAPPED, "", f"Model engineArgs.{flag}")

    def without_warm_up(self, schedule: str, *keys: str, target: str = "actor.optimizer") -> None:
        """``constant`` of transformers has no warm-up: that is ``constant_with_warmup``."""
        if str(self.values[schedule]) == "constant":
            self.set(f"{target}.warmup_steps_proportion", 0.0)
            for key in keys:
                if self.is_given(key):
                    self.mark(key, Fate.IGNORED, f"{schedule} constant has no warm-up")

    def warm_up(self, key: str, total: Any, target: str = "actor.optimizer") -> None:
        """``key`` gives the warm-up in steps: a share of them here. ``total``: their number, None if not known."""
        steps, target = self.values.get(key), f"{target}.warmup_steps_proportion"
        if steps is None or int(steps) <= 0:
            return
        if total:
            self.set(target, round(min(1.0, int(steps) / int(total)), 6))
            self.mark(key, Fate.MAPPED, f"{steps} of {total} steps", target)
        else:
            self.mark(key, Fate.LOSSY, "the warm-up is a share of the steps here, and their number is not given")

    def divided(self, key: str, whole_batch: int, part: int, unit: str, model: str = "actor") -> None:
        """``ppo_n_minibatches`` of a model, from the sizes of a step and of an update."""
        if part < 1 or whole_batch % part:
            self.mark(key, Fate.REFUSED, f"minibatches of {part} {unit} do not divide a step of {whole_batch}")
            return
        self.set(f"{model}.ppo_n_minibatches", whole_batch // part)
        note = f"{whole_batch} {unit} of a step in minibatches of {part}"
        if self.is_given(key):
            self.mark(key, Fate.MAPPED, note, f"{model}.ppo_n_minibatches")

    def bound_micro_batches(self, longest: Any, rows: Mapping[str, Any]) -> None:
        """Bound micro-batches to what the source has in one: ``rows``, by model, of ``longest`` tokens. Without a bound
        a whole minibatch is one."""
        for model, count in rows.items():
            if model in self.config and "mb_spec" not in self.config[model]:
                count = count if isinstance(count, int) and count > 0 else 1
                self.set(f"{model}.mb_spec.max_tokens_per_mb", count * int(longest))

    def validate(self) -> None:
        """Leave out the settings of an evaluation that has no data set."""
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
        """Checkpoints for recovery as often as models are saved."""
        if self.config.get("recover", {}).get("mode") == "auto" and every:
            self.set("recover.freq_steps", every)

    def write_rewards(self, what: str, imports: str, functions: Mapping[str, str], path: str = "") -> None:
        """``reward.py`` with a function for each name, whose body reads ``prompt``, ``completions`` and the row's
        columns ``data``. ``path``: a file that they call as ``_MODULE``."""
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

    def pick_columns(self, columns: Mapping[str, object], key: str) -> None:
        """``rows.py``, where columns have other names than those that are read here. ``columns``: by our name, that of
        the source; dots go into an object. ``key``: what gets the note."""
        wanted = {ours: str(theirs) for ours, theirs in columns.items() if theirs}
        if all(theirs in _READ.get(ours, (ours,)) for ours, theirs in wanted.items()):
            return
        paths = {part: self.config.get(part, {}).get("path") for part in ("train_dataset", "valid_dataset")}
        self.files["rows.py"] = _ROWS.format(train=paths["train_dataset"], valid=paths["valid_dataset"], columns=wanted)
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


def train(split: str, dataset_config: Any, tokenizer: Any) -> Any:
    return columns_named(COLUMNS, TRAIN, split, dataset_config, tokenizer)


def valid(split: str, dataset_config: Any, tokenizer: Any) -> Any:
    return columns_named(COLUMNS, VALID, split, dataset_config, tokenizer)
'''


# Names that are read before others: a row may have `messages` or `prompt` beside the `problem` that the source names.
_READ = {"prompt": ("messages", "prompt"), "response": ("response",)}
