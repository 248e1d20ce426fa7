"""What a no-op ``areal apply`` costs: CPU time and peak memory for 1, 100, 1,000 and 5,000 recorded objects; and what
it cost to record them in the first place, every one of them made durable. Both beside a bare click program.

    python benchmarks/apply.py [--rounds 5] [--write]

The objects are models of a suspended service: recorded, planned and compared like any other, with no process to look
at. CPU time is user plus system of the whole process. Targets: linear in the number of objects, and 1,000 of them in
at most 2 CPU-seconds, 8 times a bare click program, and 30 times to create them; peak memory is stated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cli import cpu_seconds, programs
from benchmarks.reporting import header, publish, table

SIZES = (1, 100, 1000, 5000)
TARGET_1000_S = 2.0

SERVICE = "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: default}\nspec: {suspend: true}\n"
MODEL = """---
apiVersion: areal.dev/v1alpha1
kind: Model
metadata:
  name: model-{number}
  labels: {{tier: t{tier}}}
spec:
  backend: sglang:d2t2
  path: Qwen/Qwen3-8B
  replicas: {replicas}
  engineArgs: {{max-model-len: 8192}}
"""


def manifest(size: int) -> str:
    models = (MODEL.format(number=n, tier=n % 5, replicas=n % 7 + 1) for n in range(size - 1))
    return SERVICE + "".join(models)


def apply(home: Path, path: Path) -> tuple[str, float, float]:
    """(standard output, CPU seconds, peak MiB) of one command, by the operating system's own accounting."""
    command = [sys.executable, "-m", "areal.cli", "apply", "-f", str(path), "-q"]
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "AREAL_HOME": str(home), "PYTHONPATH": root}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    text = process.stdout.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"apply failed with {process.returncode}\n{text[-2000:]}")
    return text, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the results in benchmarks/results")
    options = parser.parse_args()
    found = {**header("apply"), "rounds": options.rounds, "rows": []}
    with tempfile.TemporaryDirectory() as name:
        homes, created = {}, {}
        bare_command = programs(Path(name))["bare click --help"]
        bares: list[float] = []  # in turn with the applies, so that a busy machine slows both
        for size in SIZES:
            path = Path(name) / f"{size}.yaml"
            path.write_text(manifest(size))
            homes[size] = (Path(name) / f"home-{size}", path)
            bares.append(cpu_seconds(bare_command, dict(os.environ)))
            began = time.perf_counter()
            _, cpu_s, _ = apply(*homes[size])
            created[size] = (cpu_s, time.perf_counter() - began)
        spent: dict[int, list[tuple[float, float]]] = {size: [] for size in SIZES}
        for _ in range(options.rounds):
            for size in SIZES:
                bares.append(cpu_seconds(bare_command, dict(os.environ)))
                text, cpu_s, peak_mib = apply(*homes[size])
                assert text.count("unchanged") == size, "this was no no-op"
                spent[size].append((cpu_s, peak_mib))
    bare = statistics.median(bares)
    for size in SIZES:
        cpu_s = statistics.median(cpu for cpu, _ in spent[size])
        peak = max(peak for _, peak in spent[size])
        base = found["rows"][0]["cpuSeconds"] if found["rows"] else 0.0
        per_object = 1e6 * (cpu_s - base) / (size - 1) if size > 1 else None
        row = {"objects": size, "cpuSeconds": round(cpu_s, 3), "peakMiB": round(peak, 1)}
        row |= {"createdCpuSeconds": round(created[size][0], 2), "createdInSeconds": round(created[size][1], 2)}
        row |= {"overBareClick": round(cpu_s / bare, 1), "createdOverBareClick": round(created[size][0] / bare, 1)}
        found["rows"].append({**row, "microsecondsPerObject": None if per_object is None else round(per_object)})
    rows = [
        (r["objects"], r["cpuSeconds"], r["overBareClick"], r["microsecondsPerObject"] or "", r["peakMiB"],
         r["createdCpuSeconds"], r["createdOverBareClick"], r["createdInSeconds"],
         f"at most {TARGET_1000_S} s; 8x, 30x" if r["objects"] == 1000 else "")
        for r in found["rows"]
    ]  # fmt: skip
    columns = "objects, CPU s, over bare click, us an object, peak MiB, created: CPU s, over it, wall s, target"
    publish(found, table(columns.split(", "), rows), options.write)


if __name__ == "__main__":
    main()
