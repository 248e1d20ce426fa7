"""Run the benchmarks again and compare them with the results that are checked in.

    python benchmarks/run.py [NAME ...] [--stale] [--write] [--list]

Without names all of them run, one after the other. ``--stale`` runs only those whose result is older than the code that
it measures (by the git log of the measured paths); ``--list`` runs none and says which those are. ``--write`` keeps the
new results in place of the old ones. Exit code: 0 when no figure is worse than its spread allows and no result is old;
1 when a figure is worse, or a benchmark failed or missed its own target; 3 when all that ran is as it was, but results
that are checked in are older than their code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.comparison import Benchmark, Change, commits_since, compare
from benchmarks.reporting import RESULTS, table

_WEB = ("areal/services/http",)
_PROXY = ("areal/services/inference/data_proxy", "areal/services/inference/recorder", *_WEB)
_RELAY = "areal/services/inference/gateway"
_EMBEDDED = "areal/services/inference/engines/embedded"
_TRAINING = ("areal/training", "areal/rollout", "areal/reward", _EMBEDDED, *_PROXY)
_COMMANDS = ("areal/cli", "areal/state", "areal/resources", "areal/reconcilers", "areal/runtime")

CATALOG = (
    Benchmark(
        "cli",
        ("areal/cli", "areal/state"),
        {"rows.areal *.ratio": "lower"},
        ("cpuMilliseconds", "p10", "p90"),
        ratios=True,
    ),
    Benchmark("apply", _COMMANDS, {"rows.*.cpuSeconds": "lower", "rows.*.peakMiB": "lower"}, least_spread=0.25),
    Benchmark(
        "scale",
        ("areal/reconcilers", "areal/runtime/backends", "areal/services/inference/router", _RELAY),
        {"plans.*.cpuSeconds": "lower", "applies.*.cpuSeconds": "lower", "routers.*.calls.*": "lower"},
        least_spread=0.3,
    ),
    Benchmark(
        "clusters",
        ("areal/reconcilers", "areal/runtime"),
        {"medians.*.ourShare": "lower", "noOps.*.cpuSeconds": "lower"},
        least_spread=0.5,
    ),
    Benchmark(
        "quickstart",
        ("areal/reconcilers", "areal/runtime", "areal/services/inference"),
        {"medians.*": "lower", "memoryMB.*": "lower"},
        least_spread=0.25,
    ),
    Benchmark(
        "engine",
        (_EMBEDDED,),
        {"runs.*.rows.*.embeddedIsByCpu": "higher"},
        ("tokensPerSecond", "lowest", "highest"),
        ratios=True,
    ),
    Benchmark(
        "gateway",
        (_RELAY, "areal/services/inference/router", *_PROXY),
        {"idleMb.gateway*": "lower"},
        least_spread=0.15,
    ),
    Benchmark("growth", _PROXY, {"ratio": "lower"}, ratios=True),
    Benchmark(
        "agents",
        ("areal/services/agent", "areal/services/journal", "areal/services/inference/router", *_WEB),
        {
            "turns.*.cpu_us": "lower",
            "turns.*.p50_us": "lower",
            "episode.*.cpu_ms": "lower",
            "resident_mib.*": "lower",
            "socket_kib": "lower",
        },
        least_spread=0.25,
    ),
    Benchmark("http_server", _WEB, {}, None, 0.25, ratios=True),
    Benchmark(
        "weight_push",
        ("areal/services/weight_update", "areal/services/weight_transfer", _EMBEDDED),
        {"*.wall_ratio_lowest": "lower", "*.cpu_ratio": "lower"},
        least_spread=0.2,
        ratios=True,
    ),
    Benchmark("recording", ("areal/services/inference/recorder",), {"interactions.*.cpu_us": "lower"}, None, 0.2),
    Benchmark(
        "spans", ("areal/services/inference/engines", *_PROXY), {"turns.*.of_an_event_a_token": "lower"}, None, 0.3
    ),
    Benchmark(
        "traces",
        ("areal/http/tracing.py", "areal/http/spans.py"),
        {"loads.*.over_off": "lower"},
        ("over_off", "least", "most"),
        ratios=True,
    ),
    Benchmark(
        "grpo",
        _TRAINING,
        {"arms.*synchronous.stepsPerCpuSecond": "higher", "arms.*synchronous.stepsTo": "lower"},
        least_spread=0.15,
    ),
    Benchmark("async_training", _TRAINING, {"cases.*.stepsPerSecond": "higher"}, None, 0.15),
    Benchmark("sft", ("areal/training", "areal/dataset"), {"arms.areal*.tokensPerCpuSecond": "higher"}, None, 0.15),
    Benchmark("logits", ("areal/training/engines",), {"steps.chunked.peak_mib": "lower"}),
    Benchmark("ui", ("areal/ui", "areal/trajectories"), {"views.*.cpuS": "lower", "*MB": "lower"}, least_spread=0.5),
    *(
        Benchmark(
            f"real_engines_{engine}_cpu",
            (f"areal/services/inference/engines/{engine}.py", "areal/services/inference/engines/transport.py"),
            {"train_*.weights_s": "lower", "train_*.mismatch_kl": "lower"},
            least_spread=0.5,
            command=("real_engines", engine, "--profile", "cpu"),
        )
        for engine in ("sglang", "vllm")
    ),
    Benchmark("staleness", ("areal/rollout", *_PROXY), {"arms.*.per_cpu_s": "higher"}, None, 0.15),
)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(each.name for each in CATALOG))
    parser.add_argument("--stale", action="store_true", help="run those whose result is older than what it measures")
    parser.add_argument("--list", action="store_true", help="run none: say which results are old")
    parser.add_argument("--write", action="store_true", help="keep the new results in benchmarks/results")
    options = parser.parse_args(words)
    by_name = {each.name: each for each in CATALOG}
    unknown = [name for name in options.names if name not in by_name]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(by_name)}")
    chosen = [by_name[name] for name in options.names] or list(CATALOG)
    old = {each.name: reasons for each in CATALOG if (reasons := reasons_to_repeat(each))}
    if options.stale:
        chosen = [each for each in chosen if each.name in old]
    ok = True
    for benchmark in [] if options.list else chosen:
        good = repeated(benchmark, write=options.write)
        ok = ok and good
        if options.write and good:
            old.pop(benchmark.name, None)
    print(table_of_ages(chosen if options.list else CATALOG, old))
    return 1 if not ok else 3 if old else 0


def reasons_to_repeat(benchmark: Benchmark) -> list[str]:
    """Why a checked-in result does not speak of the present code; empty where it does."""
    result = checked_in(benchmark)
    if result is None:
        return ["there is no result"]
    if "date" not in result:
        return ["its result has no date"]
    return commits_since(REPOSITORY, (benchmark.script, *benchmark.measures), result["date"])


def checked_in(benchmark: Benchmark, results: Path | None = None) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(((results or RESULTS) / f"{benchmark.name}.json").read_text())
    except FileNotFoundError:
        return None
    return found


def repeated(benchmark: Benchmark, *, write: bool) -> bool:
    """Run one and print the comparison; whether it succeeded and no figure is worse."""
    print(f"# {benchmark.name}\n", flush=True)
    before = checked_in(benchmark)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(REPOSITORY / benchmark.script), *benchmark.command[1:], "--write"]
        environment = {**os.environ, "AREAL_BENCH_RESULTS": folder}
        code = subprocess.run(
            command, env=environment, cwd=REPOSITORY, stdin=subprocess.DEVNULL, check=False
        ).returncode
        after = checked_in(benchmark, Path(folder))
        if after is None:
            print(f"\n{benchmark.name} failed with exit code {code} and left no result\n")
            return False
        changes = compare(benchmark, before, after) if before is not None else []
        print(f"\n{report(changes)}\n", flush=True)
        if write:
            for file in Path(folder).iterdir():
                shutil.copy(file, RESULTS / file.name)
    if code:
        print(f"{benchmark.name} ended with exit code {code}: it misses a target of its own\n")
    return code == 0 and not any(change.worse for change in changes)


def report(changes: Sequence[Change]) -> str:
    if not changes:
        return "There is nothing to compare with."
    rows = []
    for change in changes:
        if change.before is None or change.after is None:
            verdict, by = "not measured now" if change.after is None else "new", ""
        else:
            verdict = "WORSE" if change.worse else "better" if -change.by > change.allowed else "as before"
            verdict = verdict if change.comparable else "another machine"
            by = f"{abs(change.by):.0%} {'worse' if change.by > 0 else 'better'} (+-{change.allowed:.0%})"
        rows.append((change.path, _number(change.before), _number(change.after), by, verdict))
    return table(("figure", "checked in", "now", "change (spread)", ""), rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def table_of_ages(benchmarks: Sequence[Benchmark], old: dict[str, list[str]]) -> str:
    rows = []
    for benchmark in benchmarks:
        result, reasons = checked_in(benchmark), old.get(benchmark.name, [])
        more = f", and {len(reasons) - 2} more" if len(reasons) > 2 else ""
        state = f"OLDER than: {'; '.join(reasons[:2])}{more}" if reasons else "newer than what it measures"
        rows.append((benchmark.name, result.get("date", "?") if result else "never", state))
    return table(("benchmark", "measured", "its code"), rows)


if __name__ == "__main__":
    sys.exit(main())
