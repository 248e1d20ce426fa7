"""The models that every engine serves in this suite, and what a plain forward pass says of them.

Random Qwen3 of a shape that each engine's kernels take (heads of 64), with a byte-level tokenizer; each in two
versions of its weights, with the head tied to the embedding and not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from areal.services.inference.engines.base import WeightProbe
from tests.services.inference.engines.embedded.support import make_adapter, make_model, plain_logits
from tests.services.tokenizer_folder import write_tokenizer

VOCAB = 320
END = 2  # <|im_end|>, the model's end token
MAX_LEN = 512
TOLERANCE = 2e-3  # nats, float32
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": None,
    "eos_token_id": END,
}


@dataclass(frozen=True)
class Models:
    """``versions[i]`` is what the weights in ``folders[i]`` compute; ``adapters`` are LoRA adapters of version 0 by
    name, ``adapted`` that version with each merged in. ``broken`` holds half of its weights."""

    folders: tuple[Path, Path]
    versions: tuple[Any, Any]
    broken: Path
    adapters: Mapping[str, Path] = field(default_factory=dict)
    adapted: Mapping[str, Any] = field(default_factory=dict)


def make_models(root: Path, *, tied: bool) -> Models:
    folders = (root / "first", root / "second")
    versions = [
        make_model(folder, "Qwen3", seed=seed, tie_word_embeddings=tied, **_SHAPE)
        for seed, folder in enumerate(folders)
    ]
    for folder in folders:
        write_tokenizer(folder)
    broken = root / "broken"
    make_model(broken, "Qwen3", **{**_SHAPE, "num_hidden_layers": 1})
    (broken / "config.json").write_text((folders[0] / "config.json").read_text())
    adapters = {name: root / name for name in ("pirate", "poet")}
    adapted = {
        name: make_adapter(folder, versions[0], seed=len(name), rank=8, alpha=16) for name, folder in adapters.items()
    }
    return Models(folders, (versions[0], versions[1]), broken, adapters, adapted)


def logprobs(model: Any, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """[len(output), VOCAB] after each position that a token of ``output`` follows, by one uncached forward pass.
    ``temperature`` 0 is greedy, and as 1."""
    logits = plain_logits(model, [*prompt, *output]) / (temperature or 1.0)
    return logits.log_softmax(-1)[len(prompt) - 1 : -1]


def gap(
    model: Any, prompt: Sequence[int], output: Sequence[int], reported: Sequence[float], temperature: float = 1.0
) -> float:
    """Largest difference in nats between what an engine told and a forward pass."""
    plain = logprobs(model, prompt, output, temperature).gather(1, torch.tensor(list(output))[:, None])[:, 0]
    return float((plain - torch.tensor(list(reported))).abs().max())


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(plain_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def probe(model: Any, prompt: Sequence[int], top: int = 10) -> WeightProbe:
    values, tokens = plain_logits(model, prompt)[-1].log_softmax(-1).topk(top)
    return WeightProbe(tuple(prompt), dict(zip(tokens.tolist(), values.tolist(), strict=True)), TOLERANCE)
