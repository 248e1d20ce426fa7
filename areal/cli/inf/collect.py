"""``areal inf collect``: a batch of rollout trajectories."""

from __future__ import annotations

import click

from areal.cli import options
from areal.cli.inf.flags import model_name_option, service_option
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.pending import not_implemented


@click.command()
@service_option
@model_name_option(required=False)
@click.option("--dataset", required=True, metavar="FILE.jsonl|HF", help="Prompts: a JSONL file or a Hugging Face set.")
@click.option("--workflow", metavar="MODULE:CLASS", help="How one episode runs  [default: one answer a prompt].")
@click.option("--n-samples", type=click.IntRange(min=1), default=1, show_default=True, help="Episodes a prompt.")
@click.option("--concurrency", type=click.IntRange(min=1), default=32, show_default=True, help="Episodes at once.")
@click.option("--reward", metavar="MODULE:FN", help="Scores an episode.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N prompts.")
@click.option("--output", "directory", metavar="DIR", required=True, help="Trajectories and summary go here.")
@click.option("--parquet", is_flag=True, help="Parquet instead of JSONL.")
@click.option("--resume", is_flag=True, help="Go on where an earlier run into DIR has stopped.")
@options.remote
@options.timeout(what="Give up on an episode after this long")
@options.output(dest=None)
@options.common
@pass_invocation
def collect(cli: Invocation, /, **flags: object) -> int:
    """Collect rollout trajectories with progress, and a summary of rewards, lengths and failures."""
    return not_implemented()
