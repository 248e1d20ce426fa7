"""From ``areal apply -f manifests/quickstart.yaml`` to Ready, stage by stage; and what the idle service weighs.

    python benchmarks/quickstart.py [--rounds 5] [--write]

Wall time of the whole command, and the stages as the engine reports them. *Engine's own* is importing torch and
loading the model, which a plain Python process doing only that takes too (measured in the same round); *our share* is
the rest: command line, planning, journaling, starting and probing five processes, warm-up, routes. Target: our share
under 1 s. Resident memory is that of the gateway and the router after the first request, idle; target: 60 MB each.
Idle CPU is that of gateway, router, data proxy and engine together over ten seconds; target: 2 ms a second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

from areal.client.command import free_port

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.relaying.floor import cpu_us
from benchmarks.reporting import header, publish, table

MEDIANS = ("ready", "engineAlone", "noOp", "delete", "idleMs")
_SETTLED_S, _IDLE_S = 3.0, 10.0
MODEL = ROOT / "examples" / "reverse_digits" / "model"
ENGINE_ALONE = """
import os, sys
from pathlib import Path
from areal.services.inference.engines.embedded.loading import inspect_folder, load_model
from areal.wire.processes import EmbeddedEngineConfig
path = Path(sys.argv[1])
config = EmbeddedEngineConfig(model_path=str(path))
load_model(inspect_folder(path), config, {}, lambda *_: None, lambda _: None, lambda error: None)
os._exit(0)
"""


def areal(home: Path, *words: str) -> str:
    environment = {**os.environ, "AREAL_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "areal.cli", *words], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"areal {words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def quickstart(folder: Path, port: int) -> Path:
    """The quickstart's service and model, without the job that teaches it."""
    text = "---\n".join((ROOT / "manifests" / "quickstart.yaml").read_text().split("---\n")[:2])
    path = folder / "quickstart.yaml"
    path.write_text(text.replace("8080", str(port)).replace("examples/reverse_digits/model", str(MODEL)))
    return path


def engine_alone() -> float:
    """Seconds of wall time that importing torch and loading the model take in a process of their own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", ENGINE_ALONE, str(MODEL)], env=environment, check=True, capture_output=True)
    return time.perf_counter() - began


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def one_round(folder: Path) -> dict[str, Any]:
    home, port = folder / "home", free_port()
    manifest = quickstart(folder, port)
    began = time.perf_counter()
    areal(home, "apply", "-f", str(manifest))
    ready = time.perf_counter() - began
    began = time.perf_counter()
    areal(home, "apply", "-f", str(manifest))
    no_op = time.perf_counter() - began
    key = (home / "credentials" / "default").read_text().strip()
    body = json.dumps({"model": "reverse", "messages": [{"role": "user", "content": "1234"}]}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Authorization": f"Bearer {key}"}
    )
    urllib.request.urlopen(request, timeout=30).read()
    found = json.loads(areal(home, "get", "processes", "-o", "json"))
    rows = found["items"] if isinstance(found, dict) else found
    pids = {row["component"]: row["pid"] for row in rows if row["pid"]}
    memory = {component: round(resident_mb(pid), 1) for component, pid in pids.items()}
    idle = idle_ms_a_second(pids)
    began = time.perf_counter()
    areal(home, "delete", "inferenceservice/default", "--cascade", "--yes")
    took = {"ready": ready, "noOp": no_op, "delete": time.perf_counter() - began}
    return {**took, "idleMs": sum(idle.values()), "idleMsOf": idle, "memoryMB": memory}


def idle_ms_a_second(pids: dict[str, int]) -> dict[str, float]:
    """CPU of each process while nobody calls, engine watch, leases and journal's upkeep included."""
    time.sleep(_SETTLED_S)
    before = {component: cpu_us(pid) for component, pid in pids.items()}
    time.sleep(_IDLE_S)
    return {component: round((cpu_us(pid) - before[component]) / 1e3 / _IDLE_S, 2) for component, pid in pids.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the results in benchmarks/results")
    options = parser.parse_args()
    rounds = []
    for number in range(options.rounds + 1):
        with tempfile.TemporaryDirectory() as name:
            alone = engine_alone()
            row = {**one_round(Path(name)), "engineAlone": alone}
        if number:  # the first one fills the page cache and compiles byte code
            rounds.append(row)

    def median(key: str) -> float:
        return round(statistics.median(row[key] for row in rounds), 2)

    share = round(statistics.median(row["ready"] - row["engineAlone"] for row in rounds), 2)
    memory = {name: max(row["memoryMB"][name] for row in rounds) for name in rounds[0]["memoryMB"]}
    found = {
        **header("quickstart", torch=version("torch"), aiohttp=version("aiohttp")),
        "rounds": rounds,
        "medians": {key: median(key) for key in MEDIANS} | {"ourShare": share},
        "memoryMB": memory,
    }
    rows: list[tuple[object, ...]] = [
        ("apply to Ready, whole command", f"{median('ready')} s", ""),
        ("importing torch and loading the model, alone", f"{median('engineAlone')} s", ""),
        ("our share", f"{share} s", "under 1 s"),
        ("no-op apply", f"{median('noOp')} s", ""),
        ("delete", f"{median('delete')} s", ""),
        ("idle, all four processes", f"{median('idleMs')} ms of CPU a second", "under 2 ms"),
    ]
    goal = {"gateway": "at most 60 MB", "router": "at most 60 MB"}
    rows += [(f"resident memory, {name}", f"{size} MB", goal.get(name, "")) for name, size in sorted(memory.items())]
    publish(found, table(("what", "median", "target"), rows), options.write)


if __name__ == "__main__":
    main()
