"""What a training configuration runs (models, engine, batches), and how long a step takes. Keys are read as they are
written; absent ones have the defaults of the configuration's classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from areal.dataclasses import dataclass
from areal.errors import UsageFault
from areal.estimate.memory import GIB, Served, Trained, sequences
from areal.estimate.shapes import Shape
from areal.resources.backend import Part, parse_backend

Reader = Callable[[str, Any], Any]
"""The value of a dotted key of the configuration, or the default."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DEFAULTS: dict[str, object] = {
    "dtype": "bfloat16",
    "optimizer_dtype": "float32",
    "grad_reduce_dtype": "float32",
    "optimizer.type": "adam",
    "lora_rank": 32,
}
PROMPT = 256  # tokens
N_MINIBATCHES, N_SAMPLES, MAX_NEW_TOKENS, BATCH = 4, 1, 16384, 1
_OFFLINE = {"sft": "model", "rw": "model", "dpo": "actor"}


class Device(NamedTuple):
    """A GPU model. ``flops``: dense bfloat16 operations a second. ``bandwidth``: bytes of its memory a second. Both are
    0 for a CPU."""

    title: str
    memory: int
    flops: float = 0.0
    bandwidth: float = 0.0


DEVICES = {  # memory as nvidia-smi and rocm-smi report it, the rest from the makers' data sheets
    "a10g": Device("A10G", 23028 << 20, 70e12, 600e9),
    "l4": Device("L4", 23034 << 20, 121e12, 300e9),
    "rtx4090": Device("RTX 4090", 24564 << 20, 165e12, 1008e9),
    "a100-40": Device("A100 40 GB", 40960 << 20, 312e12, 1555e9),
    "l40s": Device("L40S", 46068 << 20, 362e12, 864e9),
    "a100": Device("A100 80 GB", 81920 << 20, 312e12, 2039e9),
    "h100": Device("H100", 81559 << 20, 989e12, 3350e9),
    "h200": Device("H200", 143771 << 20, 989e12, 4800e9),
    "b200": Device("B200", 183359 << 20, 2250e12, 8000e9),
    "mi300x": Device("MI300X", 196592 << 20, 1307e12, 5300e9),
}
TRAIN_EFFICIENCY, DECODE_EFFICIENCY, PREFILL_EFFICIENCY = 0.35, 0.6, 0.4  # shares of flops, bandwidth, flops
PUSH_BYTES_S = 2e9  # a weight update, as measured (docs/gpu.md)


@dataclass(frozen=True)
class Batch:
    """The data of a step. ``prompt`` and ``answer``: tokens of the average prompt and answer; ``longest``: of the
    longest row."""

    samples: int
    prompt: int
    longest: int
    answer: int
    minibatches: int = 1

    @property
    def tokens(self) -> int:
        return self.samples * (self.prompt + self.answer)


@dataclass(frozen=True)
class Run:
    """What a step runs. ``passes``: the models of the forward passes besides those of the update. ``at_once``: rollouts
    and training overlap. ``concurrent``: the most samples in flight."""

    models: tuple[Trained, ...]
    batch: Batch
    passes: tuple[Trained, ...] = ()
    at_once: bool = True
    concurrent: int = 0


def trainer_type(get: Reader) -> str:
    """Return ``trainer.type``. Raises UsageFault if it is not a built-in trainer."""
    kind = get("trainer.type", None)
    if kind not in (*_OFFLINE, "grpo", "ppo"):
        what = "there is no trainer.type that trains" if kind is None else f"trainer.type is {kind!r}"
        raise UsageFault(f"{what}: what is kept in memory is not known", hint="grpo, ppo, sft, rw or dpo")
    return str(kind)


def roles(get: Reader) -> dict[str, str]:
    """Return the path of each model by the section that names it."""
    kind = trainer_type(get)
    first = "actor" if kind not in ("sft", "rw") or get("actor", None) else "model"
    found = {first: str(get(f"{first}.path", None) or "")}
    if kind == "dpo":
        found["ref"] = get("ref.path", "") or found[first]
    for role in ("critic", "ref") if kind in ("grpo", "ppo") else ():
        if get(role, None):
            found[role] = get(f"{role}.path", "") or found[first]
    return found


def batch_of(get: Reader, prompt: int | None, answer: int | None, *, by_agents: bool = False) -> Batch:
    """Return the data of a step with prompts of ``prompt`` tokens (None: ``PROMPT`` on average, and at most what the
    configuration keeps) and answers of ``answer`` (by default half of the longest). Raises UsageFault if agents choose
    the length (``by_agents``) and no setting bounds it."""
    rows, kind = int(get("train_dataset.batch_size", BATCH)), trainer_type(get)
    bound = get("train_dataset.max_length", None)
    if kind in _OFFLINE:  # a row is a conversation, or a pair of them
        prompt = min(prompt or PROMPT, int(bound) - 1) if bound else prompt or PROMPT
        most = int(bound) - prompt if bound else 2 * (answer or prompt)
        samples = rows * (1 if kind == "sft" else 2)
        return Batch(samples, prompt, prompt + most, min(most, answer or max(1, most // 2)))
    most = int(get("gconfig.max_new_tokens", 0))
    if not most and by_agents and answer is None:
        raise UsageFault("nothing says how long the agents' answers are", hint="--answer-tokens N, on average")
    most = most or (2 * answer if by_agents and answer else MAX_NEW_TOKENS)
    whole = int(get("gconfig.max_tokens", None) or 0)
    kept = prompt or int(bound or 0) or max(PROMPT, whole - most)  # tokens of the longest prompt
    longest, prompt = min(kept + most, whole or kept + most), min(prompt or PROMPT, kept)
    minibatches = int(get("actor.ppo_n_minibatches", N_MINIBATCHES))
    samples = rows * int(get("gconfig.n_samples", N_SAMPLES))
    return Batch(samples, prompt, longest, min(most, answer or max(1, most // 2)), minibatches)


def run_of(get: Reader, shapes: dict[str, Shape], part: Part, batch: Batch, nodes: int, on_cpu: bool) -> Run:
    """Return what a step runs. ``shapes``: by role. ``part``: used unless a model's ``backend`` has as many ranks."""
    kind = trainer_type(get)
    models = {role: _trained(get, role, kind, shape, part, batch, nodes, on_cpu) for role, shape in shapes.items()}
    first = next(iter(models.values()))
    passes = [each for role, each in models.items() if role in ("ref", "critic")]
    method, updates = get("actor.prox_logp_method", "recompute"), batch.minibatches * first.epochs
    without = method == "loglinear" or (method == "reuse_train_logp" and updates == 1)
    without = without and get("actor.m2_threshold", None) is None
    if not without if get("actor.use_decoupled_loss", False) else get("actor.recompute_logprob", False):
        passes.append(first)
    at_once = bool(get("async_training", True)) and int(get("rollout.max_head_offpolicyness", 0)) > 0
    prompts = get("rollout.max_concurrent_rollouts", None) or get("rollout.consumer_batch_size", None) or 1
    concurrent = int(prompts) * int(get("gconfig.n_samples", N_SAMPLES))
    return Run(tuple(models.values()), batch, tuple(passes), at_once, concurrent)


def _trained(
    get: Reader, role: str, kind: str, shape: Shape, part: Part, batch: Batch, nodes: int, on_cpu: bool
) -> Trained:
    section = role if get(role, None) else "actor"  # DPO's reference is the untrained actor

    def read(name: str) -> Any:
        return get(f"{section}.{name}", DEFAULTS.get(name))

    written = get(f"{section}.backend", None)
    own = parse_backend(str(written)).training if written else None
    part = own if own is not None and own.world_size == part.world_size else part
    is_critic = role == "critic" or kind == "rw"
    is_reference = role == "ref"
    trained = 0 if is_reference else shape.critic_parameters if is_critic else shape.parameters
    if trained and read("use_lora"):
        trained = shape.adapters(int(read("lora_rank")), tuple(read("target_modules") or ()))
    longest = batch.longest
    each = -(-batch.samples * longest // (part.data * batch.minibatches))  # tokens of a minibatch on one rank
    limit = read("mb_spec.max_tokens_per_mb") or (2048 if on_cpu else None)  # None: a minibatch is one micro-batch
    micro = max(longest, min(int(limit), each)) if limit else max(longest, each)
    return Trained(
        role=role,
        shape=shape,
        part=part,
        is_critic=is_critic,
        compute=BYTES[read("dtype")],
        master=BYTES[read("optimizer_dtype")],
        reduce=BYTES[read("grad_reduce_dtype")],
        trained=trained,
        moments=2 if read("optimizer.type") == "adam" else 0,
        checkpointing=bool(read("gradient_checkpointing")),
        micro_tokens=micro,
        micro_batches=-(-each // micro),
        nodes=nodes,
        epochs=int(read("ppo_epochs") or get("actor.ppo_epochs", None) or 1),
    )


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of the parts of a step."""

    rollout: float
    training: float
    update: float
    at_once: bool

    @property
    def whole(self) -> float:
        work = self.training + self.update
        return max(self.rollout, work) if self.at_once else self.rollout + work


def forward_flops(shape: Shape, batch: Batch) -> float:
    """Return the operations of a forward pass over a batch: two per active parameter and token, and attention."""
    length = batch.prompt + batch.answer
    return batch.tokens * (2.0 * shape.active + 2.0 * shape.layers * shape.query_width * length)


def step_time(run: Run, served: Served | None, device: Device) -> StepTime:
    """Return the seconds of a step, of which ``served`` None has no rollout."""
    first = run.models[0]
    speed = device.flops * TRAIN_EFFICIENCY * first.part.world_size
    work = sum(
        forward_flops(each.shape, run.batch) * (4 if each.checkpointing else 3) * each.epochs
        for each in run.models
        if each.trained
    )
    training = (work + sum(forward_flops(each.shape, run.batch) for each in run.passes)) / speed
    if served is None:
        return StepTime(0.0, training, 0.0, at_once=False)
    update = served.compute * served.shape.parameters / PUSH_BYTES_S
    return StepTime(_rollout(run, served, device), training, update, run.at_once)


def _rollout(run: Run, served: Served, device: Device) -> float:
    """Return the seconds of a step's rollout. A token of each running sequence costs one read of the weights and of
    their caches, or its operations if these take longer."""
    shape, part, batch = served.shape, served.part, run.batch
    ranks = part.tensor * part.pipeline
    own = -(-min(run.concurrent or batch.samples, batch.samples * 2) // part.data)
    running = max(1, min(own, sequences(served, device.memory)))
    read = served.compute * shape.parameters / ranks + running * served.token_bytes * (batch.prompt + batch.answer / 2)
    token_s = max(
        read / (device.bandwidth * DECODE_EFFICIENCY),
        2.0 * shape.active * running / (ranks * device.flops * PREFILL_EFFICIENCY),
    )
    tokens = -(-batch.samples // part.data) * batch.answer
    prefill = 2.0 * shape.active * batch.samples * batch.prompt / (part.world_size * device.flops * PREFILL_EFFICIENCY)
    return tokens / running * token_s + prefill


def gib(size: int) -> float:
    return size / GIB
