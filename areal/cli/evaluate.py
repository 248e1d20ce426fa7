"""``areal eval``: scores of a model or of a job's saved weights on a data set, with intervals, against a baseline."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal.cli import options
from areal.cli.apply import converge, resource
from areal.cli.inf.collect import CollectionFlags, CollectionRun, collected, collection_options, only_model, prepared
from areal.cli.objects import complete_names, recorded, service_option, stored
from areal.cli.operate import mutation
from areal.cli.options import FiniteRange, Invocation, gather, stack
from areal.cli.output import emit_one, field, render_table
from areal.cli.remote import gateway, gateway_of, model_at
from areal.client.gateway import GatewayClient
from areal.errors import Conflict, NotFound, TargetFailed, UsageFault
from areal.numbers import number
from areal.resources.kinds import INFERENCE_SERVICE, MAX_NAME_LENGTH, MODEL, TRAIN_JOB, Ref, name_problem

if TYPE_CHECKING:
    from areal.dataset.examples import ExampleSet
    from areal.rollout.evaluation import Comparison, PromptScores
    from areal.rollout.evaluation_files import EvaluationFiles

_START_S = 1800.0
_DELETION_S = 30.0
_LOOK_S = 0.2
_WORST = 5  # prompts that are printed of those that got worse
_METRICS = ("pass@1", "reward")


class _Metric(click.ParamType[Any]):
    """A threshold: ``0.8``, ``pass@4=0.9`` or ``reward=0.5``."""

    name = "metric"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        name, equals, number = value.rpartition("=")
        name = name if equals else "pass@1"
        with contextlib.suppress(ValueError):
            if (name == "reward" or re.fullmatch(r"pass@[1-9]\d{0,3}", name)) and math.isfinite(float(number)):
                return name, float(number)
        raise click.BadParameter(f"{value!r} is not a number, pass@K=NUMBER or reward=NUMBER", ctx, param)


class _Judgement(NamedTuple):
    """The flags that say what a score is, and which one is a failure."""

    pass_threshold: float
    confidence: float
    baseline: str | None
    fail_under: tuple[str, float] | None


_judgement_options = gather(
    "judgement",
    _Judgement,
    (
        click.option(
            "--pass-threshold",
            type=FiniteRange(),
            default=1.0,
            show_default=True,
            metavar="REWARD",
            help="A sample passes from this reward on.",
        ),
        options.confidence_option("Of the intervals."),
        click.option(
            "--baseline",
            metavar="NAME|DIR|trainjob/NAME@STEP",
            help="An earlier evaluation, or a job's own after a step, to compare with.",
        ),
        click.option(
            "--fail-under",
            type=_Metric(),
            metavar="[METRIC=]X",
            help="Exit 8 if pass@1, or pass@K or reward, is below X.",
        ),
    ),
)


@click.command()
@click.argument("target", required=False, metavar="[MODEL|trainjob/NAME[@STEP]]", shell_complete=complete_names(MODEL))
@service_option
@collection_options
@_judgement_options
@click.option("--backend", metavar="BACKEND", help="Serves a job's weights  [default: that of its model].")
@click.option("--name", metavar="NAME", help="Name of the evaluation  [default: the target's].")
@click.option("--output", "directory", metavar="DIR", help="Its folder  [default: evaluations/NAME of the home].")
@click.option("--resume", is_flag=True, help="Continue an evaluation that was interrupted.")
@stack(options.remote, options.timeout("10m", "Give up on an episode after this long", positive=True))
@stack(options.output(dest=None), options.common, options.pass_invocation)
def evaluate(
    cli: Invocation,
    /,
    target: str | None,
    service: str | None,
    flags: CollectionFlags,
    judgement: _Judgement,
    backend: str | None,
    name: str | None,
    directory: str | None,
) -> int:
    """Evaluate a model, or the weights that a job saved at STEP (0: those that it began with), on a data set.

    \b
    areal eval qwen --dataset test.jsonl --reward number --n-samples 4
    areal eval trainjob/learn@350 --dataset test.jsonl --reward my_reward.py:score --baseline learn-0

    Prints pass@k and the mean reward with intervals that are clustered by prompt, lengths and failures; with a
    baseline, the differences prompt by prompt. The weights of a job are served for the evaluation alone. After a kill,
    the same command with --resume continues. Exit status: 0; 8 if a score is below --fail-under or significantly below
    the baseline's, or if all episodes failed; 9 if some failed; 130 interrupted.
    """
    from areal.dataset.examples import load_examples
    from areal.rollout.collection_output import refuse_begun
    from areal.rollout.evaluation_files import evaluations_folder

    wanted = _parse(target)
    _check_metric(flags, judgement.fail_under)
    name = _name(name, target)
    folder = Path(directory or evaluations_folder(cli.home) / name).absolute()
    if not flags.resume:
        refuse_begun(folder)
    baseline = _read_baseline(cli, judgement.baseline) if judgement.baseline else None
    if baseline is not None and baseline.files.path.resolve() == folder.resolve():
        raise UsageFault(f"--baseline {judgement.baseline} is this evaluation: it would be compared with itself")
    dataset = load_examples(flags.dataset, prompt_field=flags.prompt_field, system=flags.system)
    if baseline is not None:
        _check_baseline(baseline, dataset, flags)
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(prepared(flags, dataset))
        served: contextlib.AbstractContextManager[GatewayClient]
        if isinstance(wanted, _Saved):
            model, spec = f"eval-{name}"[:MAX_NAME_LENGTH].strip("-"), _spec(cli, wanted, backend)
            served = _served(cli, model, spec, folder, _DELETION_S if flags.resume else 0.0)
        else:
            if backend:
                raise UsageFault("--backend is only for the weights of a job; this model is already served")
            chosen = gateway_of(cli, service)
            model, served = model_at(cli, service, wanted) or only_model(chosen), contextlib.nullcontext(chosen)
        run = stack.enter_context(collected(cli, flags, work, served, model, dataset, folder, target=target or model))
        _list(cli, folder, name)
        scores = _scores(run, flags)
        document: dict[str, Any] = {"name": name, "target": target or model, "output": str(folder)}
        document |= _scored(run, scores, dataset, flags, judgement)
        comparison = _compared(scores, baseline, judgement)
        if baseline is not None and comparison is not None:
            document["comparison"] = {
                "baseline": baseline.files.name,
                "baseline_path": str(baseline.files.path),
                **comparison.document(),
            }
        run.output.finish(document, complete=run.progress.complete)
        emit_one(cli, document, name=name, text=lambda: _page(document))
        if run.progress.complete or not run.interrupted:
            _require_success(document["scores"], comparison, judgement)
        return run.exit_status(cli)


def _list(cli: Invocation, folder: Path, name: str) -> None:
    """Create a link in the home to the evaluation's folder, for the page and for --baseline. Its name is the
    evaluation's, with a number if another evaluation has this name."""
    from areal.rollout.evaluation_files import evaluations_folder

    listed = evaluations_folder(cli.home)
    if folder.parent == listed or any(each.resolve() == folder.resolve() for each in listed.glob("*")):
        return
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    link = next(listed / each for each in names if not (listed / each).exists())
    try:
        listed.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)  # to a folder that is gone
        link.symlink_to(folder)
    except OSError as error:
        cli.info(f"areal ui does not list {folder}: {error.strerror}")


class _Saved(NamedTuple):
    """The weights of a job at a step; None: the newest that it saved."""

    job: str
    step: int | None


def _parse(target: str | None) -> str | _Saved | None:
    if target is None or "/" not in target:
        return target
    from areal.rollout.evaluation_files import JOB

    match = JOB.fullmatch(target)
    if match is not None:
        return _Saved(match["name"], int(match["step"]) if match["step"] else None)
    kind, _, name = target.partition("/")
    if kind.lower() in ("model", "models") and name_problem(name) is None:
        return name
    raise UsageFault(f"{target!r} is neither a model nor trainjob/NAME[@STEP]")


def _check_metric(flags: CollectionFlags, fail_under: tuple[str, float] | None) -> None:
    """Raise UsageFault if the evaluation will not compute the metric of --fail-under."""
    from areal.rollout.evaluation import sample_counts

    metrics = ["reward", *(f"pass@{k}" for k in sample_counts(flags.n_samples))]
    if fail_under is not None and fail_under[0] not in metrics:
        there = f"the scores of {flags.n_samples} samples are {', '.join(metrics)}"
        raise UsageFault(f"--fail-under {fail_under[0]}: {there}")
    if not flags.reward and not flags.workflow:
        raise UsageFault("no reward is given", hint="--reward module:function, or `exact` or `number`")


def _name(given: str | None, target: str | None) -> str:
    name = given or re.sub(r"[^a-z0-9]+", "-", (target or "model").partition("/")[2].lower() or (target or "model"))
    name = name if given else name[:MAX_NAME_LENGTH].strip("-")
    if problem := name_problem(name):
        raise UsageFault(f"--name {name}: {problem}")
    return name


def _spec(cli: Invocation, saved: _Saved, backend: str | None) -> dict[str, object]:
    """Return the spec of a Model that serves the weights."""
    from areal.ui.jobs import config_of

    if (remote := gateway(cli)) is not None:
        raise UsageFault(
            f"the weights of a job are served by this machine, and {remote.url} is another gateway",
            hint="--context local",
        )
    job = stored(cli.home, Ref(TRAIN_JOB, saved.job))
    config = config_of(cli.home.jobs / saved.job)
    path = _weights(cli, saved, config, Path(job.spec.get("workingDir") or "."))
    spec = _model_spec(cli, job.spec, config)
    if backend:
        spec["backend"] = backend
    if not spec.get("backend"):
        raise UsageFault(
            f"cannot choose an engine for the weights of {job.ref}: it samples from no model of this home",
            hint="--backend embedded, sglang:d1, vllm:d1 ...",
        )
    return {**spec, "path": str(path), "replicas": 1}


@contextlib.contextmanager
def _served(
    cli: Invocation, name: str, spec: Mapping[str, object], folder: Path, left_s: float
) -> Iterator[GatewayClient]:
    """Serve the weights with a separate service. Another process deletes the service when the block or this process
    ends. Raises Conflict if an object of this name still exists after ``left_s``, because it does not belong to this
    evaluation."""
    from areal.client.command import free_port, stop_with_this_process

    for ref in (Ref(INFERENCE_SERVICE, name), Ref(MODEL, name)):
        deadline = time.monotonic() + left_s  # a command that was killed leaves it for as long as its deletion takes
        while recorded(cli, ref) is not None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if recorded(cli, ref) is not None:
            raise Conflict(
                f"{ref} exists: another evaluation of this name runs, or its service was not deleted",
                hint=f"areal inf stop --service {name}, or another --name",
            )
    manifests = [
        resource(INFERENCE_SERVICE, name, {"gateway": {"port": free_port()}}),
        resource(MODEL, name, {**spec, "service": name}),
    ]
    environment = {**os.environ, "AREAL_HOME": str(cli.home.root)}
    with stop_with_this_process(name, folder / "service.log", environment):
        cli.info(f"serving {spec['path']} as {name}, {spec['backend']}")
        with mutation(cli) as context:
            outcome = converge(cli, context, manifests, command="eval", timeout=_START_S)
        for item in outcome.objects:
            if item.error is not None:
                raise item.error
        if outcome.exit_code:
            raise TargetFailed(f"{name} did not become ready: {'; '.join(outcome.notes)}")
        yield gateway_of(cli, name)


def _weights(cli: Invocation, saved: _Saved, config: Mapping[str, object], working: Path) -> str | Path:
    """Return the folder of the weights, or their hub id."""
    if saved.step == 0:
        actor = config.get("actor")
        path = actor.get("path") if isinstance(actor, Mapping) else None
        if not isinstance(path, str) or not path:
            raise NotFound(f"the initial weights of trainjob/{saved.job} are unknown: it has written no config.yaml")
        return working / path if (working / path).is_dir() else path
    models = cli.home.jobs / saved.job / "models"
    steps = {
        int(each.name.removeprefix("step_")): each
        for each in (models.iterdir() if models.is_dir() else ())
        if re.fullmatch(r"step_\d{1,12}", each.name)
    }
    step = saved.step if saved.step is not None else max(steps, default=-1)
    if step not in steps:
        listed = ", ".join(map(str, sorted(steps))) or "none"
        raise NotFound(
            f"trainjob/{saved.job} has no saved weights"
            + (f" of step {saved.step}" if saved.step is not None else "")
            + f"; saved steps: {listed}",
            hint="`saver: {freq_steps: N}` of its configuration saves them",
        )
    return steps[step]


def _model_spec(cli: Invocation, job: Mapping[str, Any], config: Mapping[str, object]) -> dict[str, object]:
    """Return the spec of the model that the job samples from: its engine, parsers and limits."""
    from areal.state.objects import ObjectStore

    rollout = job.get("rollout") or {}
    found = ObjectStore(cli.home).get(Ref(MODEL, rollout["model"])) if rollout.get("model") else None
    if found is not None and "external" not in found.spec:
        return {key: value for key, value in found.spec.items() if key not in ("adapters", "servedModelName")}
    own = config.get("rollout")
    backend = own.get("backend") if isinstance(own, Mapping) else None
    return {"backend": backend} if isinstance(backend, str) and backend else {}


def _scored(
    run: CollectionRun,
    scores: Sequence[PromptScores],
    dataset: ExampleSet,
    flags: CollectionFlags,
    judgement: _Judgement,
) -> dict[str, object]:
    """Return the summary of the collection with the scores. Raises UsageFault if nothing computes a reward."""
    from areal.rollout.evaluation import estimates

    summary = run.summary()
    if summary["unrewarded"]:
        raise UsageFault(
            f"{summary['unrewarded']} of {run.progress.done} episodes have no reward",
            hint="an agent returns its reward, or --reward module:function computes it",
        )
    threshold, confidence = judgement.pass_threshold, judgement.confidence
    found = estimates(scores, flags.n_samples, threshold, confidence)
    return {
        "dataset": {"source": dataset.source, "digest": dataset.digest, "prompts": len(dataset.examples)},
        "prompt_field": flags.prompt_field,
        "reward_function": flags.reward,
        "samples": flags.n_samples,
        "pass_threshold": threshold,
        "confidence": confidence,
        "scores": {name: each.document() for name, each in found.items()},
        **summary,
    }


def _scores(run: CollectionRun, flags: CollectionFlags) -> list[PromptScores]:
    """Return the scores without the episodes in the folder that are beyond --limit and --n-samples."""
    from areal.rollout.evaluation import scores_of

    prompts, samples = run.progress.planned // run.plan.samples, run.plan.samples
    wanted = (each for each in run.output.episodes() if each.prompt < prompts and each.sample < samples)
    return scores_of(wanted, flags.prompt_field)


class _Baseline(NamedTuple):
    files: EvaluationFiles
    scores: Sequence[PromptScores]


def _read_baseline(cli: Invocation, text: str) -> _Baseline:
    from areal.rollout.evaluation import scores_of
    from areal.rollout.evaluation_files import JOB, find_evaluation
    from areal.trajectories.reading import each_once, read_episodes

    if match := JOB.fullmatch(text):
        stored(cli.home, Ref(TRAIN_JOB, match["name"]))
    try:
        files = find_evaluation(cli.home, text)
    except NotFound as error:
        raise NotFound(f"--baseline {text}: {error.message}", hint=error.hint) from error
    if not files.path.is_dir():
        return _Baseline(files, scores_of(read_episodes(files.path), None))
    episodes = list(each_once(read_episodes(files.path)))
    planned, done = (files.summary.get(name, 0) for name in ("planned", "done"))
    if missing := planned - min(done, len(episodes)):  # a later run that was killed may have cut the file
        cli.info(f"the baseline has {planned - missing} of {planned} episodes; {missing} are missing")
    return _Baseline(files, scores_of(episodes, files.summary.get("prompt_field")))


def _check_baseline(baseline: _Baseline, dataset: ExampleSet, flags: CollectionFlags) -> None:
    """Raise Conflict for a baseline with another reward or other prompts, before anything is sampled."""
    from areal.dataset.examples import prompt_digest
    from areal.rollout.evaluation import check_prompts, prompt_keys

    reward = baseline.files.summary.get("reward_function", flags.reward)
    if reward != flags.reward:
        raise Conflict(
            f"the baseline was rewarded by {reward}, and this evaluation is by {flags.reward}",
            hint="evaluate both with the same reward",
        )
    asked = dataset.examples[: flags.limit]
    digests = {each.number: prompt_digest(each.fields, flags.prompt_field) for each in asked}
    check_prompts(prompt_keys(digests).values(), baseline.scores)


def _compared(scores: Sequence[PromptScores], baseline: _Baseline | None, judgement: _Judgement) -> Comparison | None:
    from areal.rollout.evaluation import compare

    if baseline is None:
        return None
    return compare(scores, baseline.scores, judgement.pass_threshold, judgement.confidence)


def _require_success(
    scores: Mapping[str, Mapping[str, float]], comparison: Comparison | None, judgement: _Judgement
) -> None:
    """Raise TargetFailed for a score below --fail-under, or a significant decrease."""
    faults = []
    hint = None
    if judgement.fail_under is not None:
        metric, least = judgement.fail_under
        value = scores.get(metric, {}).get("value", math.nan)
        if scores and math.isnan(value):  # too many episodes failed
            faults.append(f"{metric} is unknown: no prompt has enough scored samples")
        elif value < round(least, 6):  # scores are rounded: one of 3 prompts is not below 1/3
            faults.append(f"{metric} is {value:g}, below {least:.7g}")
    if comparison is not None and comparison.dropped:
        faults.append(f"the scores are significantly below those of {judgement.baseline}")
        hint = "`-o json` lists the prompts that changed"
    if faults:
        raise TargetFailed("; ".join(faults), hint=hint)


def _page(document: Mapping[str, Any]) -> str:
    dataset = document["dataset"]
    head = (
        f"{document['target']} on {dataset['source']}: {document['done']} of {document['planned']} episodes,"
        f" {document['samples']} for each prompt; a sample passes from a reward of {number(document['pass_threshold'])}"
    )
    parts = [head]
    if document["scores"]:
        parts.append(_table(document["scores"], document["confidence"]))
    tokens = document["answer_tokens"]
    facts = (
        [f"tokens     {number(tokens['mean'])} an episode, p50 {tokens['p50']}, p90 {tokens['p90']}"] if tokens else []
    )
    facts.append(f"truncated  {document['truncated']}")
    if document["failures"]:
        facts.append("failures   " + ", ".join(f"{count} {kind}" for kind, count in document["failures"].items()))
    parts.append("\n".join([*facts, f"folder     {document['output']}"]))
    if comparison := document.get("comparison"):
        changed = comparison["changed"]
        fell = [each for each in changed if each["after"] < each["before"]]
        both = comparison["reward"]["prompts"]
        parts.append(f"difference to {comparison['baseline']}, prompt by prompt")
        parts.append(_table({name: comparison[name] for name in _METRICS}, document["confidence"]))
        parts.append(f"{len(changed) - len(fell)} prompts better, {len(fell)} worse, {both - len(changed)} alike")
        worst = sorted(fell, key=lambda each: each["after"] - each["before"])[:_WORST]
        parts.append(
            "\n".join(
                f"  prompt {each['number']}: {number(each['before'])} before, {number(each['after'])} now"
                for each in worst
            )
        )
    return "\n\n".join(parts)


def _table(scores: Mapping[str, Mapping[str, Any]], confidence: float) -> str:
    rows = [
        {
            "name": name,
            "value": each["value"],
            "interval": "unknown" if each["low"] is None else f"{number(each['low'])} to {number(each['high'])}",
            "prompts": each["prompts"],
        }
        for name, each in scores.items()
    ]
    columns = (
        field("", "name"),
        field("SCORE", "value", right=True),
        field(f"{number(confidence)} INTERVAL", "interval", right=True),
        field("PROMPTS", "prompts", right=True),
    )
    return render_table(rows, columns)
