"""``areal train estimate``: memory of a job's models on each GPU, and the time of a step, before it starts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal.cli.manifest import SourceFlags, source_options
from areal.cli.options import FiniteRange, Invocation, print_options, refuse_flags
from areal.cli.output import Column, Row, as_list, emit_rows, field, render_table, write
from areal.cli.train import job_manifest
from areal.dataclasses import replace
from areal.errors import InvalidManifest, NoCapacity, NotFound, UsageFault, did_you_mean
from areal.files import parse_json
from areal.numbers import duration, number, size
from areal.resources.kinds import AGENT_SERVICE, MODEL, TRAIN_JOB

if TYPE_CHECKING:
    from areal.estimate.memory import Served
    from areal.estimate.runs import Device, StepTime
    from areal.estimate.shapes import Shape
    from areal.reconcilers.kinds.job_config import JobConfig
    from areal.resources.backend import Part
    from areal.resources.resource import Resource

_CPU = "cpu"
_PARTS = ("weights", "gradients", "optimizer", "gathered", "activations", "kvCache")


@click.command()
@click.argument("words", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...")
@source_options
@click.option("--gpu", metavar="NAME", help="Such as h100 or a100-40, or cpu  [default: h100].")
@click.option("--memory-gib", type=FiniteRange(min=0, min_open=True), metavar="N", help="Of each GPU instead.")
@click.option(
    "--prompt-tokens", type=click.IntRange(min=1), help="Of a prompt  [default: 256, and at most the data set's bound]."
)
@click.option(
    "--answer-tokens", type=click.IntRange(min=1), help="Of an answer, on average  [default: half of the most]."
)
@print_options
def estimate(
    cli: Invocation,
    words: tuple[str, ...],
    source: SourceFlags,
    gpu: str | None,
    memory_gib: float | None,
    prompt_tokens: int | None,
    answer_tokens: int | None,
) -> int:
    """Estimate the memory of a job on each GPU and the time of a step, from its configuration and its models' shapes.

    \b
    areal train estimate grpo.yaml actor.path=Qwen/Qwen3-8B
    areal train estimate -f grpo.yaml --values profiles/gpu8.yaml --gpu a100

    Nothing is measured: docs/estimate.md has the formulas. Exit status 10 if something cannot fit.
    """
    device = _device(gpu, memory_gib)
    resources = _resources(words, source)
    jobs = [each for each in resources if each.kind == TRAIN_JOB]
    if not jobs:
        raise UsageFault(
            "there is no TrainJob in these manifests", hint="areal train estimate CONFIG, or -f FILE with one"
        )
    try:
        documents = [_document(each, resources, device, prompt_tokens, answer_tokens) for each in jobs]
    except OverflowError as error:
        raise UsageFault("a number of the configuration is too large to estimate") from error
    if cli.format.is_table:
        write("\n\n".join("\n".join(_lines(each)) for each in documents))
    else:
        emit_rows(cli, documents, (), name=lambda row: str(row["job"]), wrap=as_list)
    problems = [problem for each in documents for problem in each["problems"]]
    if problems:
        raise NoCapacity("; ".join(problems), hint="docs/estimate.md says what makes each part smaller")
    return 0


def _device(name: str | None, memory_gib: float | None) -> Device | None:
    """Return the device to estimate for; None: that of the job's engine, the CPU or an H100. Raises UsageFault."""
    from areal.estimate.memory import GIB
    from areal.estimate.runs import DEVICES, Device

    if name is None and memory_gib is None:
        return None
    name = (name or "h100").lower()
    if name == _CPU:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device("the CPU", int(memory_gib * GIB) if memory_gib else memory)
    if name not in DEVICES:
        raise UsageFault(f"--gpu {name}: its memory is not known{did_you_mean(name, DEVICES)}", hint=", ".join(DEVICES))
    known = DEVICES[name]
    return known._replace(memory=int(memory_gib * GIB)) if memory_gib else known


def _resources(words: Sequence[str], source: SourceFlags) -> Sequence[Resource]:
    from areal.resources.render import RenderRequest, render

    if not source.is_empty:
        if words:
            raise UsageFault("CONFIG and -f cannot be used together", hint="with -f, use --set to change values")
        return source.render().resources
    refuse_flags("without -f or -k", source)
    config = words[0] if words and "=" not in words[0] else None
    if config is None:
        raise UsageFault("no configuration and no manifest is given", hint="areal train estimate CONFIG, or -f FILE")
    if not Path(config).is_file():
        raise NotFound(f"there is no configuration {config}")
    manifest = job_manifest(config, name=None, driver=None, overrides=words[1:], restart={"policy": "Never"})
    return render(RenderRequest(manifests=(manifest,))).resources


def _config_of(job: Resource) -> JobConfig:
    from areal.reconcilers.desired import Wanted
    from areal.reconcilers.kinds.job_config import JobConfig, class_faults, config_file
    from areal.resources.nodes import ManifestError

    given, file = job.spec.get("config"), job.source.file
    folder = Path(str(job.spec.get("workingDir") or Path.cwd()))
    spec = dict(job.spec)
    if isinstance(given, str):
        if (found := config_file(given, folder, file)) is None:
            raise NotFound(f"there is no configuration {given}")
        spec["config"] = str(found.absolute())
    wanted = Wanted(str(job.ref), job.kind, job.name, spec, {}, {}, source={"file": file})
    if faults := class_faults(wanted, job):
        raise ManifestError(faults)
    return JobConfig.of(wanted)


def _document(
    job: Resource,
    resources: Sequence[Resource],
    device: Device | None,
    prompt_tokens: int | None,
    answer_tokens: int | None,
) -> Row:
    from areal.estimate.memory import CPU_RESERVE, RESERVE, peak, sequences, serving_use, training_use
    from areal.estimate.runs import DEVICES, batch_of, gib, roles, run_of, step_time
    from areal.resources.backend import Part

    config = _config_of(job)
    engine = _engine(job, config, resources)
    on_one = engine is not None and engine.part.engine == "embedded" and "cuda" not in str(engine.args.get("device"))
    found = device or (_device(_CPU, None) if on_one else None) or DEVICES["h100"]
    on_cpu = not found.flops
    by_agents = bool((job.spec.get("rollout") or {}).get("agents"))
    batch = batch_of(config.get, prompt_tokens, answer_tokens, by_agents=by_agents)
    paths = {role: config.absolute(path) if path else "" for role, path in roles(config.get).items()}
    shapes = {role: _shape(path, f"{job.ref}: {role}.path") for role, path in paths.items()}
    laid_out = config.training()
    part = laid_out[1] if laid_out is not None else Part("fsdp")
    nodes = int((job.spec.get("resources") or {}).get("nodes") or 1)
    run = run_of(config.get, shapes, part, batch, nodes, on_cpu)
    uses = [training_use(each, found.memory) for each in run.models]
    rows = [_use_row(use, str(model.part)) for use, model in zip(uses, run.models, strict=True)]
    needed = {"training": (part.world_size, peak(uses, CPU_RESERVE if on_cpu else RESERVE))}
    served = None
    if engine is not None:
        served = _served(engine, batch.longest, on_cpu)
        use = serving_use(served, found.memory)
        rows.append(_use_row(use, str(served.part)))
        needed["rollout"] = (served.part.world_size, use.kept + served.reserve)
        if engine.shared:
            needed = {"training and rollout": (part.world_size, sum(most for _, most in needed.values()))}
    if on_cpu:
        needed = {"all processes": (1, sum(count * most for count, most in needed.values()))}
    return {
        "job": job.name,
        "estimated": True,
        "device": found.title,
        "memoryGiB": gib(found.memory),
        "samples": batch.samples,
        "tokensAtMost": batch.longest,
        "microBatchTokens": run.models[0].micro_tokens,
        "models": rows,
        "needed": [{"place": at, "devices": count, "gib": gib(most)} for at, (count, most) in needed.items()],
        "cachedSequences": sequences(served, found.memory) if served is not None else None,
        "sequenceTokens": served.sequence if served is not None else None,
        "step": None if on_cpu else _step_row(step_time(run, served, found)),
        "problems": [f"{job.ref}: {each}" for each in _problems(needed, served, found)],
    }


def _step_row(time: StepTime) -> dict[str, object]:
    return {
        "seconds": time.whole,
        "rolloutSeconds": time.rollout,
        "trainingSeconds": time.training,
        "weightUpdateSeconds": time.update,
        "atOnce": time.at_once,
    }


def _problems(needed: Mapping[str, tuple[int, int]], served: Served | None, device: Device) -> Iterator[str]:
    """Yield the parts that cannot fit."""
    from areal.estimate.memory import sequences, serving_use

    if served is not None and not sequences(served, device.memory):
        left, want = serving_use(served, device.memory).kv_cache, served.token_bytes * served.sequence
        yield (
            f"an engine has {size(left)} of {device.title} left for its cache, and one sequence of "
            f"{served.sequence} tokens takes {size(want)}"
        )
    for place, (_, most) in needed.items():
        if most > device.memory:
            each = " on each GPU" if device.flops else ""
            yield f"{place} needs {size(most)}{each}, and {device.title} has {size(device.memory)}"


def _use_row(use: Any, layout: str) -> dict[str, object]:
    from areal.estimate.runs import gib

    sizes = {name: gib(getattr(use, "kv_cache" if name == "kvCache" else name)) for name in _PARTS}
    return {"role": use.role, "layout": layout, **sizes, "loading": gib(use.loading)}


def _shape(path: str, where: str) -> Shape:
    """Return the shape of a model folder or of a hub id, whose ``config.json`` is downloaded. Raises ArealError."""
    from areal.estimate.shapes import shape_of
    from areal.hub import model_folder

    if not path:
        raise UsageFault(f"{where}: no model path is set")
    file = model_folder(path, ["config.json"]) / "config.json"
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFound(f"{where}: {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageFault(f"{where}: {file} is not valid JSON: {error}") from error
    return shape_of(content if isinstance(content, dict) else {}, f"{where}: {file}")


class _JobEngine(NamedTuple):
    """An engine: its layout, model, flags, and whether it shares the trainer's GPU."""

    part: Part
    path: str
    args: Mapping[str, Any]
    shared: bool = False


def _engine(job: Resource, config: JobConfig, resources: Sequence[Resource]) -> _JobEngine | None:
    """Return the engine that the job samples from; None for a job that does not sample."""
    from areal.resources.backend import inference_part

    wanted = job.spec.get("rollout")
    if wanted is None:
        part = config.inference()
        if part is None:
            return None
        path = config.absolute(config.text("actor.path"))
        return _JobEngine(part, path, config.engine_arguments(part.engine))
    named = {(each.kind, each.name): each for each in resources}
    agents = wanted.get("agents")
    if agents is not None:
        found = named.get((AGENT_SERVICE, agents))
        wanted = (found.spec.get("inference") or {}) if found is not None else {}
    model = named.get((MODEL, str(wanted.get("model"))))
    if model is None:
        raise InvalidManifest(
            f"{job.ref}: the Model that it samples from is not in these manifests",
            hint="name its manifest too: -f FILE",
        )
    if not model.spec.get("backend"):
        return None  # an endpoint elsewhere
    part = inference_part(str(model.spec["backend"]))
    replicas = model.spec.get("replicas")
    if isinstance(replicas, int) and replicas > 0:
        part = replace(part, data=replicas)
    path = config.absolute(str(model.spec.get("path")))
    return _JobEngine(part, path, model.spec.get("engineArgs") or {}, _share(model.spec, job.spec))


def _share(model: Mapping[str, Any], job: Mapping[str, Any]) -> bool:
    """Return whether both name the same GPU in their environment and lease none."""
    leases = [(spec.get("resources") or {}).get("gpus") for spec in (model, job)]
    seen = [(spec.get("env") or {}).get("CUDA_VISIBLE_DEVICES") for spec in (model, job)]
    return leases == [0, 0] and seen[0] is not None and seen[0] == seen[1]


def _served(engine: _JobEngine, sequence: int, on_cpu: bool) -> Served:
    from areal.estimate.memory import CPU_RESERVE, ENGINE_RESERVE, FRACTIONS, GIB, Served
    from areal.estimate.runs import BYTES
    from areal.resources.backend import flag_name
    from areal.wire.processes import EmbeddedEngineConfig

    args, part = {flag_name(key): value for key, value in engine.args.items()}, engine.part
    is_embedded = part.engine == "embedded"
    flag = {"sglang": "mem-fraction-static", "vllm": "gpu-memory-utilization"}.get(part.engine, "")
    limit = "context-length" if part.engine == "sglang" else "max-model-len"
    longest = args.get(limit)
    cache = args.get("kv-memory-gib") if is_embedded else None
    return Served(
        shape=_shape(engine.path, "the engine's model"),
        part=part,
        fraction=_number(flag, args.get(flag, FRACTIONS[part.engine]), 1),
        sequence=sequence if longest is None else min(sequence, _count(limit, longest)),
        compute=BYTES.get(str(args.get("dtype")), 4 if on_cpu else 2),
        most=_count("max-batch-size", args.get("max-batch-size", EmbeddedEngineConfig.max_batch_size))
        if is_embedded
        else 0,
        cache=0 if cache is None else int(_number("kv-memory-gib", cache) * GIB),
        reserve=CPU_RESERVE if on_cpu else ENGINE_RESERVE,
    )


def _number(flag: str, value: Any, most: float = math.inf) -> float:
    try:
        if 0 < (given := float(value)) <= most and math.isfinite(given):
            return given
    except (TypeError, ValueError):
        pass
    limit = "" if math.isinf(most) else f" and at most {number(most)}"
    raise UsageFault(f"the engine's {flag}: must be above 0{limit}, not {value!r}")


def _count(flag: str, value: Any) -> int:
    if not str(value).isdecimal() or not int(value):
        raise UsageFault(f"the engine's {flag}: must be a whole number of at least 1, not {value!r}")
    return int(value)


_MODELS = (
    field("ROLE", "role"),
    field("LAYOUT", "layout"),
    *(
        Column(title, lambda row, name=name: _size(row[name]) if row[name] else None, right=True)  # type: ignore[misc]
        for title, name in zip(
            ("WEIGHTS", "GRADIENTS", "OPTIMIZER", "GATHERED", "ACTIVATIONS", "KV CACHE", "LOADING"),
            (*_PARTS, "loading"),
            strict=True,
        )
    ),
)
_NEEDED = (
    field("PLACE", "place"),
    field("DEVICES", "devices", right=True),
    Column("OF EACH", lambda row: _size(row["gib"]), right=True),
)


def _size(gib: float) -> str:
    from areal.estimate.memory import GIB

    return size(gib * GIB)


def _lines(document: Row) -> Iterator[str]:
    yield (
        f"{document['job']}: a step has {document['samples']} samples of at most {document['tokensAtMost']} tokens; "
        f"{document['device']} has {_size(document['memoryGiB'])}. All figures are estimated, for each device."
    )
    yield ""
    yield render_table(document["models"], _MODELS)
    yield ""
    yield render_table(document["needed"], _NEEDED)
    yield ""
    if document["cachedSequences"] is not None:
        yield f"cache  {document['cachedSequences']} sequences of {document['sequenceTokens']} tokens in each engine"
    if (step := document["step"]) is not None:
        parts = f"training {duration(step['trainingSeconds'])}"
        if document["cachedSequences"] is not None:
            how = "at the same time" if step["atOnce"] else "one after the other"
            rollout, update = duration(step["rolloutSeconds"]), duration(step["weightUpdateSeconds"])
            parts = f"rollout {rollout}, {parts}, weights {update}, {how}"
        yield f"step   {duration(step['seconds'])}, estimated: {parts}"
