"""``areal generate systemd|docker``: writes files that start the services of a home at boot."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import click

from areal.cli.manifest import STDIN, SourceFlags, source_options
from areal.cli.objects import complete_targets, parse_refs, stored
from areal.cli.options import Invocation, env_option, only_with, print_options, refuse_flags, stack
from areal.cli.output import emit_one, refuse_existing, write_file
from areal.errors import UsageFault
from areal.installation import DISTRIBUTION, module_argv
from areal.reconcilers.home_view import HomeView
from areal.resources.addresses import is_loopback
from areal.resources.kinds import AGENT_SERVICE, INFERENCE_SERVICE, TRAIN_JOB
from areal.runtime.backends import LOCAL, declared_backend
from areal.runtime.backends.base import LOOPBACK
from areal.runtime.environment import inherited

if TYPE_CHECKING:
    from areal.state.records import StoredObject

_out = stack(
    click.option("--out", metavar="FILE", type=click.Path(dir_okay=False), help="Write to FILE, which must not exist."),
    click.option("--force", is_flag=True, help="Replace FILE."),
    only_with("out", "force"),
)
_env = env_option("the processes")


def _secrets(items: Sequence[StoredObject]) -> dict[str, str]:
    """Return the environment variables that objects read secrets from, each with a field that names it."""

    def walk(value: Any, path: str) -> Iterator[tuple[str, str]]:
        for key, inner in value.items() if isinstance(value, Mapping) else ():
            where = f"{path}.{key}"
            if key == "env" and isinstance(inner, str):
                yield inner, where
            yield from walk(inner, where)

    return {name: f"{item.ref} {where}" for item in items for name, where in walk(item.spec, "spec")}


def _emit(cli: Invocation, text: str, next_steps: Sequence[str], out: str | None, force: bool, name: str) -> None:
    if out is None:
        emit_one(cli, {"file": name, "text": text, "next": list(next_steps)}, name=name, text=lambda: text.rstrip("\n"))
    else:
        path = Path(out)
        refuse_existing(path, force=force)
        write_file(path, text)
        emit_one(cli, {"file": out, "text": text, "next": list(next_steps)}, name=out, text=lambda: f"wrote {out}")
    for step in next_steps:
        cli.info(f"next: {step}")


_UNIT = """\
# Written by `areal generate systemd`. Starts what {home} records, at boot; `systemctl stop` ends it
# and keeps the record. A process of areal that dies meanwhile is started again by its own supervisor.
[Unit]
Description=Services of areal in {home}
{order}
[Service]
Type=oneshot
RemainAfterExit=yes
{user}WorkingDirectory=-{folder}
{environment}
ExecStart={command}
# What could not be started leaves the rest running: `areal get` and the journal say what it is.
SuccessExitStatus=7 8 9
Restart=on-failure
RestartSec=30
TimeoutStartSec=infinity
# Every process gets SIGTERM, and this long to end what it does.
KillMode=control-group
TimeoutStopSec={stop_s}

[Install]
WantedBy={target}
"""
_STOP_S = 120


def _plain(text: str) -> str:
    """Escapes a value that extends to the end of a line in a unit. Raises UsageFault for control characters."""
    if any(ord(char) < 32 for char in text):
        raise UsageFault(f"{text!r} cannot be written into a unit: it has a control character")
    return text.replace("%", "%%")


def _quoted(text: str, *, expands: bool = False) -> str:
    """Quotes one word for systemd. ``expands``: systemd replaces variables in it."""
    text = _plain(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text.replace("$", "$$") if expands else text}"'


def _absolute(source: SourceFlags) -> list[str]:
    """Return the flags as words with absolute paths. Raises UsageFault for stdin."""
    if STDIN in source.files:
        raise UsageFault("a unit cannot read stdin", hint="-f FILE")
    words = [word for file in source.files for word in ("-f", os.path.abspath(file))]  # noqa: PTH100 - symlinks stay
    words += ["-R"] if source.recursive else []
    words += ["-k", os.path.abspath(source.overlay)] if source.overlay else []  # noqa: PTH100
    words += [word for each in source.sets for word in ("--set", each)]
    words += [word for file in source.values_files for word in ("--values", os.path.abspath(file))]  # noqa: PTH100
    return words + (["--profile", source.profile] if source.profile else [])


def _login(name: str | None) -> str:
    """Return the name of the given or the current user. Raises UsageFault."""
    try:
        return pwd.getpwnam(name).pw_name if name else pwd.getpwuid(os.getuid()).pw_name
    except KeyError as error:
        raise UsageFault(f"no user {name or os.getuid()}", hint="--run-as USER") from error


@click.command()
@click.argument("targets", nargs=-1, metavar="[KIND/NAME]...", shell_complete=complete_targets)
@source_options
@click.option("--system", is_flag=True, help="A unit of the system, not of the user  [default: for root].")
@click.option("--run-as", metavar="USER", help="User of a system unit  [default: you].")
@_env
@click.option("--env-file", metavar="FILE", type=click.Path(), help="Lines NAME=VALUE, read at each start: secrets.")
@_out
@print_options
def systemd(
    cli: Invocation,
    targets: tuple[str, ...],
    source: SourceFlags,
    system: bool,
    run_as: str | None,
    env: tuple[tuple[str, str], ...],
    env_file: str | None,
    out: str | None,
    force: bool,
) -> None:
    """Write a systemd unit that starts the home's services at boot.

    It runs `areal reconcile` for KIND/NAME or for all that is recorded; with -f or -k it applies those manifests.

    \b
    areal generate systemd --out ~/.config/systemd/user/areal.service
    areal generate systemd --system --run-as rl --env-file /etc/areal.env
    """
    if targets and not source.is_empty:
        raise UsageFault("-f and -k do not go with KIND/NAME")
    if source.is_empty:
        refuse_flags("without -f or -k", source)
    system = system or run_as is not None or os.getuid() == 0
    home, items = str(cli.home.root), list(HomeView(cli.home).objects)
    verb = ["reconcile", *(str(stored(cli.home, ref).ref) for ref in parse_refs(targets))]
    if not source.is_empty:
        verb = ["apply", *_absolute(source)]
    given, secrets = dict(env), _secrets(items)
    for name in sorted(given.keys() & secrets.keys()):
        raise UsageFault(f"--env {name}: {secrets[name]} takes a secret from it", hint="--env-file FILE, of mode 0600")
    kept = inherited(os.environ)
    folders = [str(Path(sys.executable).parent), *kept.get("PATH", os.defpath).split(":")]
    environment = {"AREAL_HOME": home, "PATH": ":".join(dict.fromkeys(folders))}
    if "PYTHONPATH" in kept:
        environment["PYTHONPATH"] = kept["PYTHONPATH"]
    lines = [f"Environment={_quoted(f'{name}={value}')}" for name, value in {**environment, **given}.items()]
    lines += [f"EnvironmentFile={_plain(os.path.abspath(env_file))}"] if env_file else []  # noqa: PTH100
    order = [f"RequiresMountsFor={_quoted(home)}"]
    if system:
        order += ["Wants=network-online.target", "After=network-online.target nvidia-persistenced.service"]
    words = module_argv("areal.cli", *verb, "--yes", "--timeout", "1h")
    unit = _UNIT.format(
        home=_plain(home),
        order="".join(f"{line}\n" for line in order),
        user=f"User={_login(run_as)}\n" if system else "",
        folder=_plain(home if source.is_empty else str(Path.cwd())),  # paths of manifests are relative to it
        environment="\n".join(lines),
        command=" ".join([_quoted(words[0]), *(_quoted(word, expands=True) for word in words[1:])]),
        stop_s=_STOP_S,
        target="multi-user.target" if system else "default.target",
    )
    if missing := sorted(secrets.keys() - given.keys()) if not env_file else ():
        cli.info(f"warning: {', '.join(missing)} must be set where services start: --env-file FILE, of mode 0600")
    if not items and source.is_empty:
        cli.info(f"warning: {home} records nothing yet: areal apply -f FILE")
    _emit(cli, unit, _next_steps(system, out), out, force, "areal.service")


def _next_steps(system: bool, out: str | None) -> list[str]:
    folder = "/etc/systemd/system" if system else "~/.config/systemd/user"
    control = "systemctl" if system else "systemctl --user"
    name = Path(out).name if out else "areal.service"
    steps = [] if out else [f"areal generate systemd ... --out {folder}/{name}"]
    steps.append(f"{control} daemon-reload && {control} enable --now {shlex.quote(name)}")
    return steps if system else [*steps, "loginctl enable-linger, so that your units start at boot without a login"]


_DOCKERFILE = """\
# Written by `areal generate docker`; its folder is the context, copied whole (.dockerignore leaves files out).
#   docker build -t areal .
#   docker run -d --restart unless-stopped --stop-timeout {stop_s} {flags} -v areal:/var/lib/areal areal
FROM {base}
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
{install}
RUN useradd --create-home areal && install -d -o areal -m 0700 /var/lib/areal
USER areal
WORKDIR /srv
ENV {environment}
# Objects, records and generated keys. Secrets come with `docker run --env-file FILE`, never with the image.
VOLUME /var/lib/areal
COPY --chown=areal . /srv
EXPOSE {ports}
# tini reaps what others leave; areal gets its SIGTERM, and ends every process before it leaves.
ENTRYPOINT ["tini", "--"]
CMD {command}
"""
_ENGINES = ("embedded", "sglang", "vllm")  # each needs the extra of its name
_KINDS = {TRAIN_JOB: "train", AGENT_SERVICE: "agents"}


def _extras(kind: str, spec: Mapping[str, object]) -> Iterator[str]:
    yield _KINDS.get(kind, "serve")
    if spec.get("backend"):
        from areal.resources.backend import parse_backend

        part = parse_backend(str(spec["backend"])).inference
        yield part.engine if part is not None and part.engine in _ENGINES else "serve"


def _of_dockerfile(text: str) -> str:
    """Quotes one word for ENV, in which Docker replaces variables. Raises UsageFault for control characters."""
    if any(ord(char) < 32 for char in text):
        raise UsageFault(f"{text!r} cannot be written into a Dockerfile: it has a control character")
    return json.dumps(text, ensure_ascii=False).replace("$", "\\$")


def _inside(source: SourceFlags) -> list[str]:
    """Return the flags as words with paths relative to the working directory. Raises UsageFault for other paths."""
    words, here = _absolute(source), Path.cwd()
    for place, word in enumerate(words):
        if words[place - 1] in ("-f", "-k", "--values"):
            words[place] = os.path.relpath(word, here)
            if words[place].startswith(".."):
                raise UsageFault(f"{word} is outside of {here}, the folder of the image's files", hint="run it there")
    return words


@click.command()
@source_options
@click.option("--base", metavar="IMAGE", help="Image to build on  [default: this version of Python, on Debian].")
@click.option("--requirement", metavar="SPEC", help="What to install  [default: areal, from its source here].")
@_env
@_out
@print_options
def docker(
    cli: Invocation,
    source: SourceFlags,
    base: str | None,
    requirement: str | None,
    env: tuple[tuple[str, str], ...],
    out: str | None,
    force: bool,
) -> None:
    """Write a Dockerfile of an image that serves manifests and restarts processes that die.

    \b
    areal generate docker -f manifests/quickstart.yaml --out Dockerfile
    """
    from areal.installation import origin
    from areal.installation import requirement as wanted

    found = source.require("generate docker").render().resources
    flags, ports, steps = _inside(source), [], ["docker build -t areal ."]
    for item in found:
        gateway = item.spec.get("gateway") or {}
        if item.kind in (INFERENCE_SERVICE, AGENT_SERVICE):
            ports.append(str(gateway.get("port", 8080 if item.kind == INFERENCE_SERVICE else 8090)))
            if (scheduler := declared_backend(item.spec)) != LOCAL:
                needs = "the image's home and Python under the same paths on its nodes, and its commands in the image"
                cli.info(f"warning: {item.ref} runs on {scheduler}, which needs {needs}")
            elif is_loopback(str(gateway.get("host", LOOPBACK))):
                setting = f"--set {str(item.ref).lower()}:spec.gateway.host=0.0.0.0"
                cli.info(f"warning: {item.ref} is reached inside the container only: {setting}")
    needed = {extra for item in found for extra in _extras(item.kind, item.spec)}
    extras, gpus = ",".join(sorted(needed)), ["--gpus all"] if needed & {"sglang", "vllm"} else []
    place = origin()
    local = unquote(urlsplit(place).path) if place.startswith("file:") else place if place.startswith("/") else ""
    if requirement is None and local:
        wheel = f"{DISTRIBUTION}-*.whl"
        install = f'COPY {wheel} /tmp/\nRUN pip install --no-cache-dir "$(echo /tmp/{wheel})[{extras}]"'
        steps.insert(0, f"pip wheel --no-deps --wheel-dir . {shlex.quote(local)}")
    elif named := requirement or wanted(extras):
        install = f"RUN pip install --no-cache-dir {shlex.quote(named)}"
    else:
        raise UsageFault(
            "this areal is not installed, so what the image installs is not known",
            hint=f"name it: --requirement '{DISTRIBUTION}[{extras}]', or the path of a wheel in the image",
        )
    environment = {"AREAL_HOME": "/var/lib/areal", "PYTHONUNBUFFERED": "1", **dict(env)}
    script = f"areal apply {shlex.join(flags)} --yes --no-wait && exec areal reconcile --watch --stop-at-exit --yes"
    text = _DOCKERFILE.format(
        base=base or f"python:{sys.version_info.major}.{sys.version_info.minor}-slim",
        install=install,
        environment=" ".join(f"{name}={_of_dockerfile(value)}" for name, value in environment.items()),
        ports=" ".join(dict.fromkeys(ports)) or "8080",
        flags=" ".join([*(f"-p {port}:{port}" for port in dict.fromkeys(ports)), *gpus]),
        stop_s=_STOP_S,
        command=json.dumps(["sh", "-c", script], ensure_ascii=False),
    )
    _emit(cli, text, steps, out, force, "Dockerfile")
