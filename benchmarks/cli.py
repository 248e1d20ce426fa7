"""What the command line costs: CPU time of `areal --help`, completion and `get` against a bare click program.

    python benchmarks/cli.py [--rounds 40] [--write]

Every round runs each program once, in turn, so that a noisy machine disturbs all of them alike; the median of the
rounds counts. CPU time is user plus system of the whole process, byte code compiled. The bare program has as many
commands as areal's root, each with a help line, and nothing else. `diff` is of the quickstart's service and model,
recorded, suspended and unchanged. Targets: `--help` at most 1.5x, `get` 1.5x, `diff` 3.5x.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.reporting import RESULTS

TARGETS = {"areal --help": 1.5, "areal get": 1.5, "areal diff": 3.5}
OBJECTS = 20

BARE = """
import click

@click.group()
def cli():
    "A program that does nothing."

for number in range({commands}):
    cli.command("command{{}}".format(number), help="Does the thing with the number {{}}.".format(number))(lambda: None)

cli()
"""
AREAL = "import sys; sys.argv = ['areal', *{words!r}]; from areal.cli.main import main; sys.exit(main())"


def programs(folder: Path) -> dict[str, list[str]]:
    from areal.cli.main import ROOT

    manifest = folder / "quickstart.yaml"
    service, model, *_ = (REPOSITORY / "manifests" / "quickstart.yaml").read_text().split("---\n")
    model = model.replace("examples/", f"{REPOSITORY}/examples/")
    manifest.write_text(f"{service}  suspend: true\n---\n{model}")
    bare = folder / "bare.py"
    bare.write_text(BARE.format(commands=len(ROOT)))

    def areal(*words: str) -> list[str]:
        return [sys.executable, "-c", AREAL.format(words=list(words))]

    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "bare click --help": [sys.executable, str(bare), "--help"],
        "areal --help": areal("--help"),
        "areal version": areal("version"),
        "areal get": areal("get"),
        "areal get processes": areal("get", "processes"),
        "areal inf ps": areal("inf", "ps"),
        "areal completion": areal(),
        "areal diff": areal("diff", "-f", str(manifest)),
    }


def environment(folder: Path, home: Path, program: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AREAL_", "PYTHON"))}
    kept.update(AREAL_HOME=str(home), PYTHONPATH=str(REPOSITORY), PYTHONPYCACHEPREFIX=str(folder / "pyc"))
    if program == "areal completion":
        kept.update(_AREAL_COMPLETE="bash_complete", COMP_WORDS="areal get model/", COMP_CWORD="2")
    return kept


def fill(home: Path) -> None:
    """A service with models, as `areal apply` records them."""
    from areal.state.home import Home
    from areal.state.objects import ObjectStore
    from areal.state.records import Layer, StoredObject

    store = ObjectStore(Home(home))
    for number in range(OBJECTS):
        kind, name = ("InferenceService", "default") if number == 0 else ("Model", f"model-{number}")
        spec: dict[str, Any] = (
            {"gateway": {"port": 8080}} if number == 0 else {"backend": "embedded", "path": "./model"}
        )
        layer = Layer("apply", spec, {"file": "service.yaml", "line": 1}, "user@host", time.time())
        store.put(StoredObject(kind, name, f"uid-{number}", layers=(layer,), created_at=time.time(), revision=1))


def cpu_seconds(command: list[str], env: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=env, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{command}: exit {done.returncode}\n{done.stderr.decode()}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as name:
        folder, home = Path(name), Path(name) / "home"
        fill(home)
        chosen = programs(folder)
        envs = {program: environment(folder, home, program) for program in chosen}
        applied = envs["areal diff"] | {"AREAL_HOME": str(folder / "applied")}
        envs["areal diff"] = applied
        cpu_seconds([each.replace("'diff'", "'apply'") for each in chosen["areal diff"]], applied)
        found: dict[str, list[float]] = {program: [] for program in chosen}
        for round_ in range(rounds + 2):
            for program, command in chosen.items():
                spent = cpu_seconds(command, envs[program])
                if round_ >= 2:  # the first two compile byte code and fill the page cache
                    found[program].append(spent)
    return found


def document(found: dict[str, list[float]]) -> dict[str, Any]:
    base = statistics.median(found["bare click --help"])
    rows = [
        {
            "program": program,
            "cpuMilliseconds": round(1000 * statistics.median(spent), 1),
            "p10": round(1000 * sorted(spent)[len(spent) // 10], 1),
            "p90": round(1000 * sorted(spent)[len(spent) * 9 // 10], 1),
            "ratio": round(statistics.median(spent) / base, 2),
            "target": TARGETS.get(program),
        }
        for program, spent in found.items()
    ]
    return {
        "benchmark": "cli",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "click": version("click")},
        "rounds": len(found["areal --help"]),
        "objects": OBJECTS,
        "rows": rows,
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def table(found: dict[str, Any]) -> str:
    machine, versions = found["machine"], found["versions"]
    lines = [
        "# Command line: CPU time",
        "",
        f"{found['date']}, {machine['cpu']}, {machine['cores']} cores, Python {versions['python']}, click "
        f"{versions['click']}; median of {found['rounds']} interleaved rounds, a home with {found['objects']} objects.",
        "",
        "| program | CPU ms (p10-p90) | against bare click | target |",
        "| --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        target = f"<= {row['target']}x" if row["target"] else ""
        spread = f"{row['cpuMilliseconds']} ({row['p10']}-{row['p90']})"
        lines.append(f"| `{row['program']}` | {spread} | {row['ratio']}x | {target} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/cli.{json,md}")
    options = parser.parse_args()
    found = document(measure(options.rounds))
    print(table(found))
    if options.write:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / "cli.json").write_text(json.dumps(found, indent=2) + "\n")
        (RESULTS / "cli.md").write_text(table(found))
    missed = [row["program"] for row in found["rows"] if row["target"] and row["ratio"] > row["target"]]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
