"""``areal inf collect``: a batch of rollout trajectories."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal.cli import options
from areal.cli.inf.address import gateway_of, model_at
from areal.cli.inf.flags import model_name_option, service_option
from areal.cli.interrupts import EXIT_INTERRUPTED, graceful
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.options import Seconds
from areal.cli.output.emit import emit_one
from areal.errors import Partial, TargetFailed, UsageFault

if TYPE_CHECKING:
    from areal.cli.remote import Gateway
    from areal.collect.agents import Agent
    from areal.collect.dataset import Dataset
    from areal.collect.output import OutputFolder
    from areal.collect.rewards import RewardPool
    from areal.collect.statistics import Tally

_EPISODE_S = 600.0
_SAMPLING = ("temperature", "top_p", "max_tokens")


@click.command()
@service_option
@model_name_option(required=False)
@click.option(
    "--dataset", required=True, metavar="FILE.jsonl|HF", help="Prompts: JSONL, JSON, Parquet, or a hub's set."
)
@click.option(
    "--prompt-field", metavar="NAME", help="The field with the prompt  [default: messages, prompt, question...]."
)
@click.option("--system", metavar="TEXT", help="System prompt, before each example's messages.")
@click.option(
    "--workflow",
    "--agent",
    "workflow",
    metavar="MODULE:CLASS",
    help="How one episode runs: module:function, or file.py:function  [default: one answer a prompt].",
)
@click.option("--temperature", type=click.FloatRange(min=0), metavar="T", help="Sampling temperature.")
@click.option("--top-p", type=click.FloatRange(0, 1), metavar="P", help="Sample from the likeliest tokens only.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Longest answer.")
@click.option("--n-samples", type=click.IntRange(1, 1024), default=1, show_default=True, help="Episodes a prompt.")
@click.option("--concurrency", type=click.IntRange(1, 4096), default=32, show_default=True, help="Episodes at once.")
@click.option("--reward", metavar="MODULE:FN", help="Scores an episode; `exact` and `number` are built in.")
@click.option(
    "--reward-timeout", type=Seconds(), default="15s", show_default=True, metavar="TIME", help="For one reward."
)
@click.option("--reward-processes", type=click.IntRange(1, 64), default=2, show_default=True, help="Rewards at once.")
@click.option("--retries", type=click.IntRange(0, 100), default=1, show_default=True, help="Tries more for a failure.")
@click.option("--discount", type=click.FloatRange(0, 1), default=1.0, show_default=True, help="Of rewards, by turn.")
@click.option(
    "--style",
    type=click.Choice(["individual", "concat"]),
    default="individual",
    show_default=True,
    help="Rows: one a turn, or one a conversation.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N prompts.")
@click.option("--output", "directory", metavar="DIR", required=True, help="Trajectories and summary go here.")
@click.option("--parquet", is_flag=True, help="Parquet instead of JSONL.")
@click.option("--resume", is_flag=True, help="Go on where an earlier run into DIR has stopped.")
@options.remote
@options.timeout("10m", "Give up on an episode after this long")
@options.output(dest=None)
@options.common
@pass_invocation
def collect(cli: Invocation, /, **given: Any) -> int:
    """Collect rollout trajectories with progress, and a summary of rewards, lengths and failures.

    \b
    areal inf collect --dataset gsm8k.jsonl --reward number --n-samples 8 --output rollouts
    areal inf collect --dataset tasks.jsonl --agent my_agent.py:solve --output rollouts --resume

    Killed at any point, the same command with --resume goes on: nothing is in the output twice, nothing is lost.
    A failure is counted by its kind and tried again; it never becomes a reward. Exit status: 0 all is there,
    9 some episodes failed, 8 all of them did, 130 interrupted.
    """
    from areal.collect.dataset import load_dataset

    if given["parquet"]:
        from areal.trajectories.parquet import pyarrow

        pyarrow()
    chosen = gateway_of(cli, given["service"])
    dataset = load_dataset(given["dataset"], prompt_field=given["prompt_field"], system=given["system"])
    agent = _agent(given)
    given["model"] = model_at(cli, given["service"], given["model"]) or _only_model(chosen)
    interrupted = threading.Event()
    with _open(given, dataset) as output:
        began = time.monotonic()
        with graceful(interrupted, "finishing the episodes at hand"):
            tally = _run(cli, given, chosen, dataset, agent, output, interrupted)
        return _finish(cli, given, output, tally, time.monotonic() - began, interrupted)


def _agent(given: dict[str, Any]) -> Agent:
    from areal.collect.agents import named_agent, single_turn

    sampling = {name: given[name] for name in _SAMPLING if given[name] is not None}
    if given["workflow"] is None:
        return single_turn(sampling)
    unused = [f"--{name.replace('_', '-')}" for name in sampling]
    if unused:
        raise UsageFault(f"{', '.join(unused)}: the agent that --workflow names asks the model as it likes")
    return named_agent(given["workflow"])


def _only_model(chosen: Gateway) -> str:
    names = [str(item.get("id")) for item in chosen.get("/v1/models").get("data", [])]
    if len(names) != 1:
        hint = f"--model {names[0]}" if names else "areal inf models"
        raise UsageFault(f"there are {len(names)} models; say which: {', '.join(names)}", hint=hint)
    return names[0]


def _open(given: dict[str, Any], dataset: Dataset) -> OutputFolder:
    """What makes two runs the same is asked of the folder; how fast or how much is not."""
    from areal.collect.output import open_folder

    same = ("model", "workflow", "reward", "system", "discount", "style", *_SAMPLING)
    asked = {"dataset": dataset.digest, **{name: given[name] for name in same}}
    return open_folder(Path(given["directory"]), asked, parquet=given["parquet"], resume=given["resume"])


def _run(
    cli: Invocation,
    given: dict[str, Any],
    chosen: Gateway,
    dataset: Dataset,
    agent: Agent,
    output: OutputFolder,
    interrupted: threading.Event,
) -> Tally:
    from areal.cli.inf.collecting import ProgressLine
    from areal.collect.dataset import limited
    from areal.collect.runner import Collection, Plan
    from areal.collect.sessions import SessionService

    service = SessionService(chosen.url, chosen.key, given["discount"], given["style"])
    with _scoring(given) as pool, ProgressLine(quiet=cli.quiet) as line:
        score, tokens = (pool.score, pool.wants_tokens) if pool is not None else (None, False)
        seconds = cli.timeout_s or _EPISODE_S
        plan = Plan(given["model"], given["n_samples"], given["concurrency"], given["retries"], seconds, tokens)
        collection = Collection(service, agent, score, output, limited(dataset, given["limit"]), plan)
        collection.run(interrupted, line)
    return collection.tally


def _scoring(given: dict[str, Any]) -> AbstractContextManager[RewardPool | None]:
    """The reward's processes while they are needed; None where no --reward is given."""
    from areal.collect.rewards import RewardPool

    if not given["reward"]:
        return nullcontext()
    size = min(given["reward_processes"], given["concurrency"])
    return RewardPool(given["reward"], size, given["reward_timeout"])


def _finish(
    cli: Invocation,
    given: dict[str, Any],
    output: OutputFolder,
    tally: Tally,
    seconds: float,
    interrupted: threading.Event,
) -> int:
    from areal.cli.inf.collecting import summary_page
    from areal.collect.statistics import failed_for, summary

    complete = tally.done == tally.planned
    document = {"output": str(output.path), "model": given["model"], **summary(tally, seconds)}
    output.finish(document, complete=complete)
    emit_one(cli, document, name=str(output.path), text=lambda: summary_page(document))
    if complete:
        return 0
    if interrupted.is_set():
        cli.say(f"interrupted with {tally.done} of {tally.planned} done; the same command with --resume goes on")
        return EXIT_INTERRUPTED
    why = f"{tally.planned - tally.done} of {tally.planned} episodes failed: {failed_for(tally.failed)}"
    hint = f"see {output.path / 'failures.jsonl'}; the same command with --resume tries them again"
    raise (Partial if tally.done else TargetFailed)(why, hint=hint)
