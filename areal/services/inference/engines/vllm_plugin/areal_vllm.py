"""What areal adds to vLLM's worker processes, by ``--worker-extension-cls areal_vllm.Worker``: weights from a folder.

vLLM's own reload answers well and goes on computing with an old head where the head is tied to the embedding: on a CPU
the head's matrix was repacked at load, and the packed copy is not made again. So it is made again here. The folder is
checked first, because a reload that stops halfway leaves a model that is neither the old one nor the new one.

Imports vLLM's environment only: this file runs where areal is not installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Worker:
    """Mixed into vLLM's worker; called over ``/collective_rpc``. Answers None, or why the old weights stay."""

    def areal_load_weights(self, path: str) -> str | None:
        worker: Any = self
        refusal = _refusal(worker.vllm_config.model_config.model, path)
        if refusal is not None:
            return refusal
        worker.reload_weights(weights_path=path)
        for module in worker.model_runner.get_model().modules():
            method = getattr(module, "quant_method", None)
            if type(module).__name__ in ("VocabParallelEmbedding", "ParallelLMHead") and method is not None:
                method.process_weights_after_loading(module)
        return None


def _refusal(served: str, path: str) -> str | None:
    """Why ``path`` cannot replace what is served: not the same tensors, or values that are no numbers."""
    import torch
    from safetensors import safe_open

    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        return f"{path} holds no *.safetensors file"
    new: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                tensor = tensors.get_tensor(name)
                new[name] = list(tensor.shape)
                if tensor.is_floating_point() and tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
                    return f"{path}: {name} holds values that are not finite"
    if not Path(served).is_dir():  # fetched from a hub: there is no folder to compare with
        return None
    old = _shapes(served)
    wrong = [name for name in old if new.get(name) != old[name]] + [name for name in new if name not in old]
    if wrong:
        return f"{path} is not this model: {wrong[0]} is {new.get(wrong[0])}, was {old.get(wrong[0])}"
    return None


def _shapes(folder: str) -> dict[str, list[int]]:
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                shapes[name] = list(tensors.get_slice(name).get_shape())
    return shapes
