"""``areal ui``: the page over this home, served in the foreground until Ctrl-C."""

from __future__ import annotations

import signal
import socket
import sys
from typing import Any
from urllib.parse import quote

import click

from areal.cli.options import Invocation, read_options
from areal.cli.output import compact, write
from areal.cli.remote import gateway
from areal.errors import ArealError


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; others need --key-file.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0: a free one.")
@click.option("--key-file", metavar="FILE", help="File with the key of the page  [default: a new token each time].")
@click.option("--open", "open_", is_flag=True, help="Open the page in a browser.")
@click.option("--allow-actions", is_flag=True, help="Let the page restart, suspend, resume, scale, end and reward.")
@read_options()
def ui(cli: Invocation, host: str, port: int, key_file: str | None, open_: bool, allow_actions: bool) -> int:
    """Serve the live page of this home: objects and why they are not ready, logs, jobs, samples. It writes
    nothing without --allow-actions; Ctrl-C ends it.

    \b
    areal ui --open
    areal ui --port 8200

    With --gateway it shows what a remote gateway serves: models, replicas, weights, sessions, chat.
    """
    from areal.cli.remote_view import documents
    from areal.state.home import read_key
    from areal.ui.access import access_of
    from areal.ui.server import PageServer, serve
    from areal.ui.views import RemoteGateway, ViewContext
    from areal.ui.views.action import Actions

    key = read_key(key_file) if key_file is not None else None
    names = {socket.gethostname(), socket.getfqdn()} if host in ("0.0.0.0", "::", "") else set()
    rules = access_of(host, key, machine=names)
    chosen = gateway(cli)
    remote = RemoteGateway(chosen, documents) if chosen is not None else None
    context = ViewContext(cli.home, remote=remote, actions=Actions() if allow_actions else None)
    if allow_actions:  # as Ctrl-C: the operation at hand is finished
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server = PageServer(host, port, context, rules)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ArealError(
            f"cannot listen on {host}:{port}: {reason}", hint="choose another --port, or leave it out for a free one"
        ) from error
    address = page_url(host, server.server_address[1], rules.token)

    def ready() -> None:
        if cli.format.is_table:
            write(address)
            cli.info("Ctrl-C ends it")
        else:
            write(compact({"url": address}))
        sys.stdout.flush()
        if open_:
            _open(cli, address)

    serve(server, ready)
    return 0


def page_url(host: str, port: Any, token: str) -> str:
    """Return the address of the page with its token in the fragment, which browsers do not send."""
    shown = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host) or (f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/#token={quote(token, safe='')}"


def _open(cli: Invocation, address: str) -> None:
    import webbrowser

    try:
        opened = webbrowser.open(address)
    except webbrowser.Error:
        opened = False
    if not opened:
        cli.info("no browser could be opened; open the address by hand")
