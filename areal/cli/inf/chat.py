"""``areal inf chat``."""

from __future__ import annotations

import click

from areal.cli import options
from areal.cli.inf.flags import model_name_option, service_option
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.pending import not_implemented


@click.command()
@service_option
@model_name_option(required=False)
@click.option("-m", "--message", metavar="TEXT", help="One shot: send TEXT, print the answer.")
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option("--temperature", type=click.FloatRange(min=0), metavar="T", help="Sampling temperature.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Longest answer.")
@click.option("--no-stream", is_flag=True, help="Print the answer when it is whole.")
@click.option("--show-logprobs", is_flag=True, help="Print each token with its log-probability.")
@options.timeout(what="Give up on an answer after this long")
@options.remote
@options.output()
@options.common
@pass_invocation
def chat(cli: Invocation, /, **flags: object) -> int:
    """Talk to a model: one shot with -m or piped stdin, else a REPL (/? lists its commands)."""
    return not_implemented()
