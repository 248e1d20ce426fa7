"""What a recorded turn of 64 tokens costs the data proxy, by what the engine reports of its weights' versions.

    python benchmarks/spans.py [--rounds 5] [--connections 16] [--turns 160] [--write]

``spans``: a vLLM or SGLang of today, whose answers end with the exact spans of weight versions. It answers once where
the caller does not stream, and sends 16 tokens an event where it does. ``event a token``: an older one, whose versions
have to be read token by token. Both answer in the recorded form of the real server (``tests/engines/replies``), with
1 ms a token. The embedded engine reports each token's version in either. CPU is the data proxy's alone; the systems
take turns within a round, the first round warms up, medians count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.relaying.floor import MODEL, PARTS, Floor, System, answers, ask, until
from benchmarks.relaying.loads import Spent, start_sessions, talked
from benchmarks.relaying.vocabulary import write_vocabulary
from benchmarks.reporting import header, publish, table

ENGINES = {
    ("vllm", "spans"): ("vllm",),
    ("vllm", "event a token"): ("vllm", "--no-spans"),
    ("sglang", "spans"): ("sglang",),
    ("sglang", "event a token"): ("sglang", "--no-spans"),
    ("embedded", "versions"): (),
}


def start(floor: Floor, tokenizer: Path, engine: str, flags: tuple[str, ...]) -> System:
    """A data proxy before the engine."""
    module = "benchmarks.relaying.recorded_engine"
    argv = (sys.executable, "-m", module, *flags) if flags else (sys.executable, str(PARTS / "mock.py"))
    _, port = floor.start(*argv)
    if not flags:
        ask(port, "POST", "/pace", {"gap_s": 0.001})
    options = ("--model", MODEL, "--engine", engine, "--engine-url", f"http://127.0.0.1:{port}")
    state = floor.folder / f"state-{engine}-{port}"
    pid, own = floor.service("data_proxy", *options, "--tokenizer-path", str(tokenizer), "--state-dir", str(state))
    until(lambda: answers(own, "/ready") or None, f"the data proxy before {engine} to be ready")
    return System(engine, own, {"data proxy": pid})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--turns", type=int, default=160)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    spent_us: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        floor = Floor(Path(folder))
        try:
            tokenizer = write_vocabulary(Path(folder) / "tokenizer")
            systems = {key: start(floor, tokenizer, key[0], flags) for key, flags in ENGINES.items()}
            keys = {key: start_sessions(system.port, options.connections) for key, system in systems.items()}
            for number in range(options.rounds + 1):
                for streamed in (False, True):
                    for key, system in systems.items():
                        with Spent(system, options.turns) as spent:
                            talked(system.port, keys[key], options.connections, options.turns, stream=streamed)
                        if number:
                            spent_us[*key, "streamed" if streamed else "whole"].append(spent.cpu_us)
        finally:
            floor.close()
    medians = {key: statistics.median(each) for key, each in spent_us.items()}
    rows = [
        {
            "engine": engine,
            "reports": reports,
            "caller": caller,
            "cpu_us": round(medians[engine, reports, caller]),
            "lowest_us": round(min(spent_us[engine, reports, caller])),
            "of_an_event_a_token": round(medians[engine, reports, caller] / medians[engine, "event a token", caller], 2)
            if (engine, "event a token", caller) in medians
            else None,
        }
        for engine, reports, caller in medians
    ]
    columns = ("engine", "reports", "caller", "CPU us a turn", "lowest", "of an event a token")
    text = table(columns, [list(row.values()) for row in rows])
    publish({**header("spans"), "connections": options.connections, "turns": rows}, text, options.write)


if __name__ == "__main__":
    main()
