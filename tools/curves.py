"""Draw the curves of an example: train it with the profile `cpu` for several seeds, each in a home of its own, and have
`areal train metrics --plot` draw them. Manifests are applied in order, one job after the other in the same home, so
that a later one finds the weights of an earlier one. It takes minutes for each seed:

    python tools/curves.py examples/gsm8k grpo.yaml ppo.yaml
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from areal.client.command import free_port

PROFILE = ("--values", "profiles/cpu.yaml")
METRICS = {"rw": "eval/accuracy", "dpo": "eval/accuracy", "sft": "eval/loss"}


def areal(folder: Path, home: Path, *words: str) -> None:
    command = [sys.executable, "-P", "-m", "areal.cli", *words]
    subprocess.run(command, cwd=folder, env={**os.environ, "AREAL_HOME": str(home)}, check=True)


def ports(documents: list[dict]) -> list[str]:
    """Settings that move the services of the manifest to free ports."""
    listed = [each for each in documents if each["kind"] in ("InferenceService", "AgentService")]
    return [
        word
        for each in listed
        for word in ("--set", f"{each['kind'].lower()}/{each['metadata']['name']}:spec.gateway.port={free_port()}")
    ]


def train(example: Path, manifests: list[str], seed: int, runs: Path) -> None:
    """Run the jobs of the manifests; the metrics of each are ``runs/MANIFEST/seed-N/metrics.jsonl``."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, home = Path(scratch, "example"), Path(scratch, "home")
        shutil.copytree(example, folder)
        for manifest in manifests:
            documents = list(yaml.safe_load_all((folder / manifest).read_text()))
            [job] = [each["metadata"]["name"] for each in documents if each["kind"] == "TrainJob"]
            seeded = ("--set", f"values.seed={seed}")
            areal(folder, home, "apply", "-f", manifest, *PROFILE, *seeded, *ports(documents), "--yes")
            areal(folder, home, "wait", f"trainjob/{job}", "--for", "completed", "--timeout", "3600s")
            kept = runs / Path(manifest).stem / f"seed-{seed}"
            kept.mkdir(parents=True, exist_ok=True)
            shutil.copy(home / "jobs" / job / "metrics.jsonl", kept)
            for each in documents:
                if each["kind"] == "InferenceService":
                    name = f"inferenceservice/{each['metadata']['name']}"
                    areal(folder, home, "delete", name, "--cascade", "--yes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", type=Path)
    parser.add_argument("manifests", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=None, help="keep metrics here, and draw those that are there")
    options = parser.parse_args()
    example = options.example.resolve()
    runs = (options.runs or Path(tempfile.mkdtemp())).resolve()
    for seed in options.seeds:
        if not all((runs / Path(each).stem / f"seed-{seed}").is_dir() for each in options.manifests):
            train(example, options.manifests, seed, runs)
    for manifest in options.manifests:
        stem = Path(manifest).stem
        shown = [f"./seed-{seed}" for seed in options.seeds]
        metric = METRICS.get(stem, "reward/mean")
        picture = str(example / f"{stem}.png")
        areal(runs / stem, runs / "home", "train", "metrics", *shown, "--metric", metric, "--plot", picture)


if __name__ == "__main__":
    main()
