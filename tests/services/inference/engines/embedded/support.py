"""Tiny random models of each family, an engine over one of them, and plain forward passes to compare with."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from hypothesis import HealthCheck, settings
from safetensors.torch import save_file

from areal.services.inference.engines.embedded.engine import Engine
from areal.services.inference.engines.embedded.grammar import Matcher
from areal.services.inference.engines.embedded.linear import Adapter
from areal.services.inference.engines.embedded.model_folder import parse, read_config
from areal.services.inference.engines.embedded.runner import DecoderRunner, ModelRunner
from areal.services.inference.engines.embedded.sampler import stream_key
from areal.services.inference.engines.embedded.scheduler import SchedulerLimits, TokenSequence
from areal.wire.sampling import SamplingParams

VOCAB = 97
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# A busy machine makes no example slow enough to be a failure.
STEADY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
LIMITS = SchedulerLimits(max_rows=8, max_length=128, kv_tokens=8 * 128, prefill_tokens=64)


def make_model(folder: Path, family: str = "Llama", *, seed: int = 0, shard: str = "5GB", **changes: Any) -> Any:
    """Save a random model and return it as transformers sees it, float32 and in evaluation mode."""
    shape = {**_SHAPE, "sliding_window": None, **changes}
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough that a wrong bias, norm or head shows, and that sampling is no coin toss.
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder, max_shard_size=shard)
    return model.eval()


def make_adapter(folder: Path, model: Any, *, seed: int = 0, rank: int = 3, alpha: int = 6, **config: Any) -> Any:
    """Save a random LoRA adapter of every projection in PEFT's format; the model with it merged in, by plain sums."""
    generator = torch.Generator().manual_seed(seed)
    merged = copy.deepcopy(model)
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in merged.named_modules():
        if not name.endswith("_proj"):
            continue
        out, inner = module.weight.shape
        down = torch.randn(rank, inner, generator=generator) * 0.3
        up = torch.randn(out, rank, generator=generator) * 0.3
        tensors |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
        with torch.no_grad():
            module.weight += scale * up @ down
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    names = sorted({name.rsplit(".", 3)[1] for name in tensors})
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": names, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
    return merged


def open_runner(folder: Path, limits: SchedulerLimits = LIMITS, dtype: torch.dtype = torch.float32) -> DecoderRunner:
    runner = DecoderRunner(parse(read_config(folder)), limits, dtype, torch.device("cpu"))
    runner.load(folder)
    return runner


class Harness:
    """A running engine whose progress can be awaited from the test's thread."""

    def __init__(self, runner: ModelRunner, limits: SchedulerLimits = LIMITS) -> None:
        self._changed = threading.Condition()
        self.failures: list[BaseException] = []
        self.engine = Engine(runner, limits, self._progress, self.failures.append)
        self.engine.start()

    def submit(
        self, prompt: Sequence[int], index: int = 0, more_coming: bool = False, **sampling: Any
    ) -> TokenSequence:
        sequence = make_sequence(prompt, index=index, room=self.engine.limits.max_length, **sampling)
        self.engine.submit([sequence], more_coming=more_coming)
        return sequence

    def wait(self, *sequences: TokenSequence, tokens: int | None = None) -> None:
        """Until each has ended, or has produced ``tokens``."""

        def reached() -> bool:
            return all(each.finish or (tokens is not None and each.produced >= tokens) for each in sequences)

        with self._changed:
            assert self._changed.wait_for(reached, timeout=60)

    def run(self, *prompts: Sequence[int], **sampling: Any) -> list[TokenSequence]:
        sequences = [self.submit(prompt, **sampling) for prompt in prompts]
        self.wait(*sequences)
        return sequences

    def close(self) -> None:
        self.engine.close()

    def _progress(self, urgent: bool) -> None:
        with self._changed:
            self._changed.notify_all()


def make_sequence(
    prompt: Sequence[int],
    *,
    index: int = 0,
    room: int = 128,
    adapter: Adapter | None = None,
    matcher: Matcher | None = None,
    **sampling: Any,
) -> TokenSequence:
    stop_ids = frozenset(sampling.get("stop_token_ids", ()))
    params = SamplingParams(**sampling)
    allowance = room - len(prompt) if params.max_new_tokens is None else params.max_new_tokens
    key = stream_key(params.seed or 0, index)
    return TokenSequence(
        list(prompt),
        params,
        allowance=allowance,
        stop_ids=stop_ids,
        index=index,
        key=key,
        adapter=adapter,
        matcher=matcher,
    )


@torch.no_grad()
def plain_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[len(tokens), vocab] float32 of one uncached forward pass."""
    logits: torch.Tensor = model(input_ids=torch.tensor([list(tokens)])).logits[0].float()
    return logits


def plain_logprobs(model: Any, sequence: TokenSequence, temperature: float = 1.0) -> torch.Tensor:
    """What a forward pass over prompt and output gives each token of the output."""
    tokens = sequence.prompt + sequence.output
    logprobs = (plain_logits(model, tokens) / temperature).log_softmax(-1)[len(sequence.prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(sequence.output)[:, None])[:, 0]


def gap(model: Any, sequence: TokenSequence, temperature: float = 1.0) -> float:
    """Largest difference between the reported logprobs and the plain ones."""
    return float((torch.tensor(sequence.logprobs) - plain_logprobs(model, sequence, temperature)).abs().max())
