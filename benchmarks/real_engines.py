"""vLLM or SGLang under areal in one go: serve, record, train, kill. For a machine with a GPU; rehearsed on a CPU.

    python -m benchmarks.real_engines sglang [--python PATH] [--env NAME=VALUE ...] [--modes disk xccl] [--write]
    python -m benchmarks.real_engines sglang --profile cpu --python PATH --steps 3

1. The engine's server is imported where the packages of ``--without`` cannot be: what has to be brought to a machine
   without a network can be left smaller (docs/gpu.md).
2. A random model is made: of 0.5 B parameters in bfloat16 (Qwen2.5-0.5B's shape), or on a CPU a tiny one in float32.
3. ``areal apply``, and the time until it is Ready.
4. Sessions at once: two recorded turns each, a reward, the export. Tokens a second, prompts not counted.
5. A TrainJob for each of ``--modes``: GRPO on the one card, beside the engine. Seconds a step and an update, and the
   largest ``mismatch_kl``: how far the engine's recorded log-probabilities are from the trainer's.
6. ``kill -9`` of the engine, and the time until it answers again.

Everything is deleted at the end. Figures go to ``benchmarks/results/real_engines_ENGINE_PROFILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from areal.client.command import free_port
from benchmarks.reporting import header, publish, table

EXAMPLE = REPOSITORY / "examples" / "reverse_digits"
PLUGINS = REPOSITORY / "areal" / "services" / "inference" / "engines"
IMPORTS = {
    "vllm": ("vllm.entrypoints.openai.api_server",),
    "sglang": ("sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler"),
}
# Of some hundred MB together, and not needed to serve a dense model with the arguments below.
HEAVY = ("cutlass", "tilelang", "tokenspeed_triton", "z3", "flash_attn", "datasets", "modelscope", "torchcodec")


@dataclass(frozen=True)
class Profile:
    """``shape``: of a Qwen2. ``arguments`` and ``env`` by engine. ``turn``: tokens of an answer."""

    shape: Mapping[str, int]
    dtype: str
    sessions: int
    turn: int
    arguments: Mapping[str, Mapping[str, Any]]
    env: Mapping[str, Mapping[str, str]]


PROFILES = {
    "gpu": Profile(
        {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
        | {"num_key_value_heads": 2, "vocab_size": 151_936, "max_position_embeddings": 2048},
        "bfloat16",
        64,
        128,
        {
            "vllm": {"gpuMemoryUtilization": 0.3, "enforceEager": True, "maxModelLen": 2048},
            "sglang": {"mem-fraction-static": "0.3", "attention-backend": "triton", "sampling-backend": "pytorch"}
            | {"disable-cuda-graph": True, "context-length": 2048},
        },
        {name: {"CUDA_VISIBLE_DEVICES": "0"} for name in IMPORTS},
    ),
    "cpu": Profile(
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512},
        "float32",
        4,
        32,
        {
            "vllm": {"enforceEager": True, "maxModelLen": 512, "maxNumSeqs": 32},
            "sglang": {"device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch"}
            | {"disable-overlap-schedule": True, "mem-fraction-static": "0.3", "max-total-tokens": 8192},
        },
        {
            "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"},
            "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
            | {"PYTHONPATH": str(REPOSITORY / "tests" / "engines" / "sglang_on_cpu")},
        },
    ),
}


def digits(prompt: str, completion: str, *rest: Any, **more: Any) -> float:
    """The share of digits: a reward that answers of a random model differ in."""
    return sum(each in "0123456789" for each in completion) / max(len(completion), 1)


def import_without(python: str, engine: str, env: Mapping[str, str], without: Sequence[str]) -> str:
    """ "" where the engine's server can be imported without the packages, else why not."""
    code = (
        "import importlib, importlib.machinery\n"
        "Finder = importlib.machinery.PathFinder\n"
        "find = Finder.find_spec\n"
        "def find_other(name, path=None, target=None):\n"
        f"    return None if name.split('.')[0] in {tuple(without)!r} else find(name, path, target)\n"
        "Finder.find_spec = staticmethod(find_other)\n"
        f"[importlib.import_module(name) for name in {IMPORTS[engine]!r}]\n"
    )
    done = subprocess.run([python, "-c", code], env=os.environ | env, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def about_engine(python: str, engine: str) -> dict[str, str]:
    """The version of the engine and of its torch, and what it computes on."""
    code = (
        "import importlib.metadata as about, json, torch\n"
        f"names = [dist.name for dist in about.distributions() if dist.name in ({engine!r}, '{engine}-cpu')]\n"
        "device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'cpu'\n"
        "print(json.dumps({name: about.version(name) for name in names} | {'torch': torch.__version__, 'on': device}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def make_model(folder: Path, profile: Profile) -> int:
    """A random model with the example's tokenizer, filled up to the vocabulary; the number of its parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **profile.shape}
    model = Qwen2ForCausalLM(Qwen2Config(**ids, tie_word_embeddings=True))
    model.to(getattr(torch, profile.dtype)).save_pretrained(folder)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(EXAMPLE / "model" / name, folder / name)
    tokenizer = json.loads((EXAMPLE / "model" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for number in range(len(vocabulary), profile.shape["vocab_size"]):
        vocabulary["w" + "".join(chr(ord("a") + int(digit)) for digit in str(number))] = number
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass
class Run:
    """A service of its own in ``folder``. ``found``: the figures so far."""

    folder: Path
    engine: str
    profile: Profile
    python: str
    env: Mapping[str, str]
    port: int = field(default_factory=free_port)
    found: dict[str, Any] = field(default_factory=dict)

    def areal(self, *words: str, timeout_s: float = 1200.0, check: bool = True) -> str:
        env = os.environ | {"AREAL_HOME": str(self.folder / "home"), "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            [sys.executable, "-m", "areal.cli", *words],
            env=env,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            raise SystemExit(f"areal {' '.join(words)} -> {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def apply(self, kind: str, name: str, spec: Mapping[str, Any]) -> None:
        manifest = {"apiVersion": "areal.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        path = self.folder / f"{kind}-{name}.json"
        path.write_text(json.dumps(manifest))
        self.areal("apply", "-f", str(path), "--timeout", "900s")

    def post(self, path: str, body: Any, key: str | None = None) -> Any:
        key = key or (self.folder / "home" / "credentials" / "default").read_text().strip()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def serve(self) -> None:
        began = time.monotonic()
        self.apply("InferenceService", "default", {"gateway": {"port": self.port}})
        env = {**self.profile.env[self.engine], **self.env, "AREAL_ENGINE_PYTHON": self.python, "HF_HUB_OFFLINE": "1"}
        arguments = {"dtype": self.profile.dtype, **self.profile.arguments[self.engine]}
        spec = {"backend": f"{self.engine}:d1", "path": str(self.folder / "model"), "resources": {"gpus": 0}}
        self.apply("Model", "reverse", {**spec, "env": env, "engineArgs": arguments})
        self.found["ready_s"] = round(time.monotonic() - began, 1)

    def session(self, number: int) -> int:
        """Tokens that were sampled in two turns."""
        (session,) = self.post("/rl/start_session", {"task_id": f"session-{number}"})["sessions"]
        key, messages, tokens = session["session_api_key"], list[dict[str, str]](), 0
        for turn in range(2):
            messages.append({"role": "user", "content": str(1000 + number + turn)})
            body = {"model": "reverse", "messages": messages, "max_tokens": self.profile.turn, "ignore_eos": True}
            answer = self.post("/v1/chat/completions", body, key)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "-"})
            tokens += answer["usage"]["completion_tokens"]
        self.post("/rl/set_reward", {"reward": 1.0}, key)
        exported = self.post("/export_trajectories", {"session_ids": [session["session_id"]]})
        assert len(exported["traj"]["logprobs"]) == 2, exported
        return tokens

    def record(self) -> None:
        self.session(0)
        began = time.monotonic()
        with ThreadPoolExecutor(self.profile.sessions) as threads:
            tokens = sum(threads.map(self.session, range(1, self.profile.sessions + 1)))
        self.found["recorded_tokens_per_s"] = round(tokens / (time.monotonic() - began))

    def train(self, mode: str, steps: int) -> None:
        overrides = {
            "actor.path": str(self.folder / "model"),
            "actor.dtype": self.profile.dtype,
            "actor.weight_update_mode": mode,
            "actor.use_decoupled_loss": True,  # then the trainer reports mismatch_kl
            "reward_fn": "benchmarks.real_engines:digits",
            "rollout.max_head_offpolicyness": 0,
            "evaluator.eval_before_train": False,
            "actor.optimizer.lr": 1e-6,
            "total_train_steps": steps,
        }
        name, listed = f"learn-{mode}", [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
        about = {"config": str(EXAMPLE / "grpo.yaml"), "overrides": listed, "resources": {"gpus": 0}}
        gpu = {name: value for name, value in self.profile.env[self.engine].items() if name == "CUDA_VISIBLE_DEVICES"}
        env = {"PYTHONPATH": str(REPOSITORY), **gpu}
        self.apply("TrainJob", name, {"rollout": {"service": "default", "model": "reverse"}, **about, "env": env})
        self.areal("wait", f"trainjob/{name}", "--for", "completed", "--timeout", "1100s")
        metrics = self.folder / "home" / "jobs" / name / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert len(lines) == steps, lines
        figures: dict[str, Any] = {"mismatch_kl": max(abs(line["mismatch_kl"]) for line in lines)}
        for key in ("time/step", "time/weights", "time/rollout"):
            if values := [line[key] for line in lines[1:] if key in line]:
                figures[f"{key.removeprefix('time/')}_s"] = round(statistics.median(values), 3)
        self.found[f"train_{mode}"] = figures

    def heal(self) -> None:
        rows = json.loads(self.areal("get", "processes", "-o", "json"))
        items = rows["items"] if isinstance(rows, dict) else rows
        (pid,) = [row["pid"] for row in items if row["component"] == "engine" and row["state"] == "running"]
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        body = {"model": "reverse", "prompt": "1234=", "max_tokens": 1, "store": False}
        while time.monotonic() - began < 600:
            try:
                self.post("/v1/completions", body)
            except (OSError, urllib.error.HTTPError):
                time.sleep(0.5)
                continue
            self.found["healed_s"] = round(time.monotonic() - began, 1)
            return
        raise SystemExit(f"the engine has not come back:\n{self.areal('describe', 'model/reverse', check=False)}")

    def end(self) -> None:
        self.areal("delete", "inferenceservice/default", "--cascade", "--yes", "--grace", "5", check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(IMPORTS))
    parser.add_argument("--profile", choices=sorted(PROFILES), default="gpu")
    parser.add_argument("--python", help="that has the engine; default: $AREAL_VLLM_PYTHON, $AREAL_SGLANG_PYTHON")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="of the engine's process")
    parser.add_argument("--modes", nargs="+", default=["disk", "xccl"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--without", nargs="*", default=HEAVY, help="packages that the import has to do without")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    python = options.python or os.environ.get(f"AREAL_{options.engine.upper()}_PYTHON", sys.executable)
    profile, env = PROFILES[options.profile], dict(item.split("=", 1) for item in options.env)
    engine_env = {**profile.env[options.engine], **env}
    plugin = str(PLUGINS / f"{options.engine}_plugin")
    path = os.pathsep.join(filter(None, (plugin, engine_env.get("PYTHONPATH"))))
    missing = import_without(python, options.engine, {**engine_env, "PYTHONPATH": path}, options.without)
    print(f"import without {', '.join(options.without)}: {missing or 'works'}", flush=True)
    with tempfile.TemporaryDirectory(prefix="real-engines-") as folder:
        run = Run(Path(folder), options.engine, profile, python, env)
        run.found["parameters"] = make_model(run.folder / "model", profile)
        try:
            run.serve()
            run.record()
            for mode in options.modes:
                run.train(mode, options.steps)
            run.heal()
        finally:
            print(json.dumps(run.found), flush=True)
            run.end()
    name, versions = f"real_engines_{options.engine}_{options.profile}", about_engine(python, options.engine)
    found = header(name, **versions) | {"import": missing or "works"} | run.found
    publish(found, table(("figure", "value"), list(flat(versions | run.found))), options.write)


def flat(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}: {inner}", each) for inner, each in flat(value))
        else:
            yield name, value


if __name__ == "__main__":
    main()
