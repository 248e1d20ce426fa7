"""``areal inf collect``: collects a batch of rollout trajectories, with progress and a summary."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from areal import interrupt
from areal.cli import options
from areal.cli.objects import model_name_option, service_option
from areal.cli.operate import ProgressPrinter, graceful
from areal.cli.options import FiniteRange, Invocation, gather, stack
from areal.cli.output import emit_one, field, render_table
from areal.cli.remote import gateway_of, model_at
from areal.dataclasses import dataclass
from areal.errors import Partial, TargetFailed, UsageFault
from areal.numbers import age, number

if TYPE_CHECKING:
    from areal.client.gateway import GatewayClient
    from areal.client.loop_thread import LoopThread
    from areal.dataset.examples import ExampleSet
    from areal.reconcilers.context import Progress
    from areal.rollout.collection import Agent, CollectionPlan, RewardScorer
    from areal.rollout.collection_output import CollectionProgress, OutputFolder


_EPISODE_S = 600.0
_SESSION_CALL_S = 60.0
_SAMPLING = ("temperature", "top_p", "max_tokens")


class CollectionFlags(NamedTuple):
    """The flags of a command that collects episodes; the last ones are not flags of every such command."""

    dataset: str
    prompt_field: str | None
    system: str | None
    workflow: str | None
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    n_samples: int
    concurrency: int
    reward: str | None
    reward_timeout: float
    reward_processes: int
    retries: int
    limit: int | None
    resume: bool
    discount: float = 1.0
    style: Literal["individual", "concat"] = "individual"
    parquet: bool = False


_options = (
    click.option(
        "--dataset", required=True, metavar="FILE.jsonl|HF", help="Prompts: JSONL, JSON, Parquet, or a hub's set."
    ),
    click.option(
        "--prompt-field", metavar="NAME", help="The field with the prompt  [default: messages, prompt, question...]."
    ),
    click.option("--system", metavar="TEXT", help="System prompt, before each example's messages."),
    click.option(
        "--workflow",
        "--agent",
        "workflow",
        metavar="MODULE:CLASS",
        help="How one episode runs: module:function, or file.py:function  [default: one answer a prompt].",
    ),
    click.option("--temperature", type=FiniteRange(min=0), metavar="T", help="Sampling temperature."),
    click.option("--top-p", type=FiniteRange(0, 1), metavar="P", help="Sample from the likeliest tokens only."),
    click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Longest answer."),
    click.option(
        "--n-samples", type=click.IntRange(1, 1024), default=1, show_default=True, help="Episodes per prompt."
    ),
    click.option(
        "--concurrency", type=click.IntRange(1, 4096), default=32, show_default=True, help="Episodes at once."
    ),
    click.option("--reward", metavar="MODULE:FN", help="Scores an episode; `exact` and `number` are built in."),
    options.duration("--reward-timeout", "15s", "For one reward."),
    click.option(
        "--reward-processes", type=click.IntRange(1, 64), default=2, show_default=True, help="Rewards at once."
    ),
    click.option(
        "--retries", type=click.IntRange(0, 100), default=1, show_default=True, help="Retries of a failed episode."
    ),
    click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N prompts."),
)
collection_options = gather("flags", CollectionFlags, _options)
"""Adds the options of a command that collects episodes, passed as ``flags``."""


@click.command()
@service_option
@model_name_option(required=False)
@collection_options
@click.option("--discount", type=FiniteRange(0, 1), default=1.0, show_default=True, help="Of rewards, per turn.")
@options.style_option("Rows: one per turn, or one per conversation.")
@click.option("--output", "directory", metavar="DIR", required=True, help="Trajectories and summary go here.")
@click.option("--parquet", is_flag=True, help="Parquet instead of JSONL.")
@click.option("--resume", is_flag=True, help="Continue an earlier run into DIR.")
@stack(options.remote, options.timeout("10m", "Give up on an episode after this long", positive=True))
@stack(options.output(dest=None), options.common, options.pass_invocation)
def collect(cli: Invocation, /, flags: CollectionFlags, service: str | None, model: str | None, directory: str) -> int:
    """Collect rollout trajectories with progress, and a summary of rewards, lengths and failures.

    \b
    areal inf collect --dataset gsm8k.jsonl --reward number --n-samples 8 --output rollouts
    areal inf collect --dataset tasks.jsonl --agent my_agent.py:solve --output rollouts --resume

    After a kill at any point, the same command with --resume continues: no episode is lost or written twice.
    A failed episode is counted by kind and retried; it never becomes a reward. Exit status: 0 all collected,
    9 some episodes failed, 8 all failed, 130 interrupted.
    """
    from areal.dataset.examples import load_examples

    if flags.parquet:
        from areal.trajectories.reading import pyarrow

        pyarrow()
    dataset = load_examples(flags.dataset, prompt_field=flags.prompt_field, system=flags.system)
    with ExitStack() as stack:
        work = stack.enter_context(prepared(flags, dataset))
        chosen = gateway_of(cli, service)
        model = model_at(cli, service, model) or only_model(chosen)
        served = nullcontext(chosen)
        run = stack.enter_context(collected(cli, flags, work, served, model, dataset, Path(directory)))
        document = {"output": directory, "model": model, **run.summary()}
        run.output.finish(document, complete=run.progress.complete)
        emit_one(cli, document, name=directory, text=lambda: summary_page(document))
        return run.exit_status(cli)


@dataclass
class CollectionRun:
    """A collection that has ended, with its folder still open."""

    output: OutputFolder
    plan: CollectionPlan
    progress: CollectionProgress
    seconds: float
    interrupted: bool

    def summary(self) -> dict[str, object]:
        from areal.rollout.collection_output import summary

        return summary(self.progress, self.seconds)

    def exit_status(self, cli: Invocation) -> int:
        """Return the exit status. Raises Partial or TargetFailed if episodes failed."""
        from areal.rollout.collection_output import failed_for

        done, planned = self.progress.done, self.progress.planned
        if self.progress.complete:
            return 0
        if self.interrupted:
            cli.info(f"interrupted with {done} of {planned} done; the same command with --resume goes on")
            return interrupt.STATUS
        why = f"{planned - done} of {planned} episodes failed: {failed_for(self.progress.failed)}"
        why += f"; the first, {self.progress.first_failure}" if self.progress.first_failure else ""
        hint = f"see {self.output.path / 'failures.jsonl'}; the same command with --resume tries them again"
        raise (Partial if done else TargetFailed)(why, hint=hint)


@dataclass
class RolloutWork:
    """The code of a collection: the agent, and the pool of reward processes (None without --reward). ``thread``: the
    event loop that runs both."""

    agent: Agent
    scorer: RewardScorer | None
    thread: LoopThread


@contextmanager
def prepared(flags: CollectionFlags, dataset: ExampleSet) -> Iterator[RolloutWork]:
    """Load the code, before anything is served or sampled. Raises ArealError if it cannot be loaded, UsageFault if a
    row lacks a column that the reward needs."""
    from areal.client.loop_thread import LoopThread
    from areal.rollout.collection import RewardScorer

    agent = _agent(flags)
    columns = [name for name in ("images", "image") if any(each.fields.get(name) for each in dataset.examples)]
    if flags.workflow is None and columns:
        raise UsageFault(
            f"{dataset.source} has a column {columns[0]}, and its prompts are asked in text",
            hint="--agent: a workflow or an agent that shows them to the model",
        )
    with ExitStack() as stack:
        thread = LoopThread("areal-collection")
        stack.callback(thread.close)
        scorer = None
        if flags.reward:
            size = min(flags.reward_processes, flags.concurrency)
            scorer = stack.enter_context(RewardScorer(flags.reward, size, flags.reward_timeout, thread))
            scorer.check(dataset, flags.limit, tokens=flags.workflow is None)
        yield RolloutWork(agent, scorer, thread)


@contextmanager
def collected(
    cli: Invocation,
    flags: CollectionFlags,
    work: RolloutWork,
    served: AbstractContextManager[GatewayClient],
    model: str,
    dataset: ExampleSet,
    folder: Path,
    **settings: Any,
) -> Iterator[CollectionRun]:
    """Collect the episodes that the options select into ``folder``. ``served`` is entered only if some are missing
    there. A resumed run must have the same model, workflow, sampling and ``settings``; limits and concurrency may
    differ."""
    from areal.client.inference import AsyncInferenceClient
    from areal.http import tracing
    from areal.rollout.collection import Collection, CollectionPlan
    from areal.rollout.collection_output import open_folder

    interrupted = threading.Event()
    names = ("discount", "style", "workflow", "reward", "system", *_SAMPLING)
    asked = {"dataset": dataset.digest, "model": model, **settings, **{name: getattr(flags, name) for name in names}}
    with open_folder(folder, asked, parquet=flags.parquet, resume=flags.resume) as output, ExitStack() as stack:
        plan = CollectionPlan(
            model,
            flags.n_samples,
            flags.concurrency,
            flags.retries,
            cli.timeout_s or _EPISODE_S,
            work.scorer is not None and work.scorer.parameters.takes_tokens,
            flags.discount,
            flags.style,
        )
        score = work.scorer.score if work.scorer is not None else None
        examples = dataset.examples[: flags.limit]
        collection = Collection(work.agent, score, output, examples, dataset.place, plan)
        chosen = None if collection.progress.complete else stack.enter_context(served)
        began = time.monotonic()
        if chosen is not None:
            client = AsyncInferenceClient(
                chosen.url,
                chosen.key or None,
                model=model,
                timeout_s=_SESSION_CALL_S,
                connections=max(1024, plan.concurrency),
            )
            with (
                graceful(interrupted, "finishing the episodes at hand"),
                ProgressPrinter(quiet=cli.quiet, verbose=bool(cli.verbose)) as printer,
            ):
                tracing.start("collect", own_code=True)
                collection.run(client, work.thread, interrupted, CollectionReport(printer))
                tracing.end()
        yield CollectionRun(output, plan, collection.progress, time.monotonic() - began, interrupted.is_set())


def _agent(flags: CollectionFlags) -> Agent:
    from areal.rollout.collection import named_agent, single_turn

    sampling = {name: value for name in _SAMPLING if (value := getattr(flags, name)) is not None}
    if flags.workflow is None:
        return single_turn(sampling)
    unused = [f"--{name.replace('_', '-')}" for name in sampling]
    if unused:
        raise UsageFault(f"{', '.join(unused)} cannot be used with --workflow: its agent sets the sampling parameters")
    return named_agent(flags.workflow)


def only_model(chosen: GatewayClient) -> str:
    """Return the only model of the gateway. Raises UsageFault if there are several, or none."""
    names = [str(item.get("id")) for item in chosen.get("/v1/models").get("data", [])]
    if len(names) != 1:
        hint = f"--model {names[0]}" if names else "areal inf models"
        raise UsageFault(f"there are {len(names)} models; say which: {', '.join(names)}", hint=hint)
    return names[0]


_SPREADS = (
    ("reward", "reward"),
    ("turns", "turns"),
    ("prompt tokens", "prompt_tokens"),
    ("answer tokens", "answer_tokens"),
    ("episode seconds", "episode_seconds"),
)
_COLUMNS = (
    field("", "what"),
    *(field(name.upper(), name, right=True) for name in ("mean", "std", "min", "p50", "p90", "p99", "max")),
)


class CollectionReport:
    """Converts the state of a collection to a ``Progress``, with rates since the start of this run."""

    def __init__(self, show: Callable[[Progress], None]) -> None:
        self._show = show
        self._began = time.monotonic()
        self._counted = self._tokens = self._rewarded = 0
        self._rewards = 0.0

    def __call__(self, progress: CollectionProgress) -> None:
        from areal.reconcilers.context import Progress

        elapsed_s, done, failed = time.monotonic() - self._began, progress.done, sum(progress.failed.values())
        for place in range(self._counted, done):
            outcome = progress.outcomes[place]
            self._tokens += outcome.generated_tokens if place >= progress.before else 0
            if outcome.reward is not None:
                self._rewarded += 1
                self._rewards += outcome.reward
        self._counted = done
        parts = [f"reward {number(self._rewards / self._rewarded)}"] if self._rewarded else []
        parts += [f"{number(self._tokens / elapsed_s)} tok/s"] if elapsed_s >= 1 else []
        parts += [f"{progress.running} running", *([f"{failed} failed"] if failed else [])]
        fresh, left = done - progress.before, progress.planned - done - failed
        eta_s = elapsed_s * left / fresh if fresh else None
        self._show(Progress("", "episodes", done, progress.planned, elapsed_s, "  ".join(parts), eta_s))


def summary_page(document: Mapping[str, Any]) -> str:
    """Return the summary as text, with the numbers of ``summary.json``."""
    head = f"{document['done']} of {document['planned']} episodes of {document['model']} in {document['output']}"
    if document["done_before"]:
        head += f" ({document['done_before']} of them by earlier runs)"
    rows = [{"what": title, **document[name]} for title, name in _SPREADS if document[name] is not None]
    parts = [head, render_table(rows, _COLUMNS)] if rows else [head]
    return "\n\n".join([*parts, "\n".join(_facts(document))])


def _facts(document: Mapping[str, Any]) -> list[str]:
    facts = []
    if document["tokens_per_second"] and document["done"] > document["done_before"]:
        speed = (
            f"{number(document['tokens_per_second'])} tokens/s, {number(document['episodes_per_second'])} episodes/s"
        )
        facts.append(f"speed      {speed}, {age(document['seconds'])}")
    groups = document["groups"]
    if groups is not None:
        all_equal = f"{groups['all_equal']} of {groups['prompts']} prompts have samples that are all rewarded alike"
        facts.append(
            f"groups     best of n {number(groups['best_of_n'])}; {all_equal}, {groups['all_best']} of them the best"
        )
    if document["truncated"]:
        facts.append(f"truncated  {document['truncated']} answers were cut at the longest")
    if document["unrewarded"]:
        facts.append(f"unrewarded {document['unrewarded']}")
    if document["retries"]:
        facts.append(f"retries    {document['retries']}")
    if document["failures"]:
        kinds = ", ".join(f"{kind} {count}" for kind, count in document["failures"].items())
        facts.append(f"failed     {document['failed']}: {kinds}")
    return facts
