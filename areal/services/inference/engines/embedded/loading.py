"""Loads a model folder into a running engine, and reports the stages: reading config, importing torch, loading weights
(in bytes), warming up.

Errors in the folder are found in its headers, before torch is imported, which takes seconds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from areal.dataclasses import dataclass, field
from areal.dataset.vision import VISION_MODELS
from areal.errors import ArealError, UsageFault
from areal.hub import model_folder
from areal.services.inference.engines.embedded.model_folder import (
    ModelConfig,
    UnsupportedArchitecture,
    buffer_slices,
    check,
    end_tokens,
    open_checkpoint,
    parse,
    read_config,
)
from areal.services.inference.engines.embedded.scheduler import SchedulerLimits
from areal.wire.processes import EmbeddedEngineConfig

if TYPE_CHECKING:
    import torch

    from areal.dataset.vision import VisionProcessor
    from areal.services.inference.engines.embedded.engine import Engine
    from areal.services.inference.engines.embedded.grammar import Grammars
    from areal.services.inference.engines.embedded.linear import Adapter
    from areal.services.inference.engines.embedded.runner import ModelRunner

T = TypeVar("T")
logger = logging.getLogger(__name__)
Report = Callable[[str, int | None, int | None], None]  # stage, done, total
_CPU_SHARE, _CUDA_SHARE = 0.25, 0.85  # shares of the free memory for the KV cache


def adapter_folders(lora: Iterable[str]) -> dict[str, Path]:
    """Return folders by name, from texts ``NAME=FOLDER``. Raises UsageFault."""
    folders = {}
    for text in lora:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise UsageFault(f"--lora {text!r} must be NAME=FOLDER")
        folders[name] = model_folder(folder)
    return folders


def _default_threads() -> int:
    """Return half of the cores, because other engines may share the machine, and no more than the memory bandwidth can
    use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else max(1, min(16, len(os.sched_getaffinity(0)) // 2))


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model. ``adapters``: by name. If ``grammars`` or ``images`` is None, ``no_grammars`` or ``no_images`` is
    the reason."""

    engine: Engine
    end_tokens: frozenset[int]
    description: str
    adapters: dict[str, Adapter] = field(default_factory=dict)
    grammars: Grammars | None = None
    no_grammars: str = ""
    images: VisionProcessor | None = None
    no_images: str = ""


@dataclass(frozen=True)
class ModelFolder:
    """A complete model folder. ``config`` is None if only transformers supports the architecture."""

    path: Path
    raw: dict[str, Any]
    config: ModelConfig | None
    reason: str  # why config is None


def inspect_folder(path: Path) -> ModelFolder:
    """Read the configuration and the headers. Raises ArealError naming a missing or mismatched part."""
    raw = read_config(path)
    try:
        config = parse(raw)
    except UnsupportedArchitecture as unsupported:
        return ModelFolder(path, raw, None, str(unsupported))
    check(buffer_slices(config), open_checkpoint(path), tied=config.tied)
    return ModelFolder(path, raw, config, "")


def load_model(
    folder: ModelFolder,
    config: EmbeddedEngineConfig,
    lora: Mapping[str, Path],
    report: Report,
    on_progress: Callable[[bool], None],
    on_failure: Callable[[BaseException], None],
) -> LoadedModel:
    """Load, warm up and start an engine. Raises ArealError if the folder or the machine does not allow it."""
    report("importing torch", None, None)
    import torch

    from areal.services.inference.engines.embedded.engine import Engine
    from areal.services.inference.engines.embedded.grammar import Grammars

    torch.set_num_threads(config.threads or _default_threads())
    device = _device(config.device)
    runner, limits = _open_runner(folder, config, device, report)
    adapters = {name: runner.read_adapter(name, path) for name, path in lora.items()}
    report("warming up", None, None)
    _warm_up(runner)
    engine = Engine(runner, limits, on_progress, on_failure)
    engine.start()
    description = f"{runner.description}; {limits.max_rows} sequences of up to {limits.max_length} tokens"
    ends = end_tokens(folder.path, folder.raw)
    grammars, no_grammars = _try_make(lambda: Grammars(folder.path, runner.vocab_size, ends))
    images, no_images = _try_make(lambda: _images(folder, runner))
    return LoadedModel(engine, ends, description, adapters, grammars, no_grammars, images, no_images)


def _try_make(make: Callable[[], T]) -> tuple[T | None, str]:
    """Return what ``make`` makes, or None and why it cannot."""
    try:
        return make(), ""
    except ArealError as error:
        return None, error.message + (f" ({error.hint})" if error.hint else "")


def _images(folder: ModelFolder, runner: ModelRunner) -> VisionProcessor:
    if folder.raw.get("model_type") not in VISION_MODELS:
        raise ArealError(f"the model type {folder.raw.get('model_type')} does not support images in this engine")
    from areal.dataset.vision import check_fit, load_processor

    processor = load_processor(str(folder.path))
    check_fit(runner.model, processor)  # type: ignore[attr-defined]
    return processor


def _open_runner(
    folder: ModelFolder, config: EmbeddedEngineConfig, device: torch.device, report: Report
) -> tuple[ModelRunner, SchedulerLimits]:
    if folder.config is not None:
        from areal.services.inference.engines.embedded.runner import DecoderRunner, position_bytes

        dtype = _dtype(config.dtype, folder.config.dtype, device, folder.path)
        limits = _limits(config, folder.config.max_positions, position_bytes(folder.config, dtype), device)
        runner = DecoderRunner(folder.config, limits, dtype, device)
        runner.load(folder.path, lambda done, total: report("loading weights", done, total))
        return runner, limits
    report("importing transformers", None, None)
    try:
        from areal.services.inference.engines.embedded.transformers_runner import TransformersRunner
    except ImportError as error:
        raise ArealError(
            f"{folder.path} cannot be served: the own decoder has no {folder.reason}, and transformers is not there",
            hint="pip install transformers",
        ) from error
    logger.info("the own decoder has no %s: transformers computes this model", folder.reason)
    report("loading weights", None, None)
    of_model = str(folder.raw.get("dtype") or folder.raw.get("torch_dtype") or "float32")
    fallback = TransformersRunner(folder.path, _dtype(config.dtype, of_model, device, folder.path), device)
    return fallback, _limits(config, fallback.max_positions, fallback.position_bytes(), device)


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ArealError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _dtype(asked: str, of_model: str, device: torch.device, folder: Path) -> torch.dtype:
    import torch

    name = of_model if asked == "auto" else asked
    if asked == "auto" and device.type == "cpu" and name in ("float16", "bfloat16") and _prefers_float32(name, folder):
        name = "float32"
    dtype: torch.dtype | None = getattr(torch, name, None)
    if dtype is None or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ArealError(f"dtype {name!r} of config.json cannot be computed with", hint="choose one with --dtype")
    return dtype


def _prefers_float32(dtype: str, folder: Path) -> bool:
    """Return whether float32 is faster. float16 is slow on every CPU, and bfloat16 would round its weights. Without
    bfloat16 instructions, bfloat16 takes 1.4 times as long for 8 rows and 2.7 times for 32; float32 is chosen if it
    leaves half of the memory."""
    import torch

    from areal.services.inference.engines.embedded.linear import onednn_supports
    from areal.services.inference.engines.embedded.runner import free_bytes

    if dtype == "float16":
        return True
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return not onednn_supports(torch.bfloat16) and 4 * weights <= free_bytes(torch.device("cpu"))


def _limits(
    config: EmbeddedEngineConfig, model_positions: int, position_bytes: int, device: torch.device
) -> SchedulerLimits:
    """Return the limits by configuration and free memory. The KV cache is at most what all rows need at full length."""
    from areal.services.inference.engines.embedded.runner import free_bytes

    wanted = config.max_model_len or model_positions
    if wanted > model_positions:
        raise ArealError(f"--max-model-len {wanted} is more than the model's {model_positions} positions")
    given = config.kv_memory_gib
    share = _CUDA_SHARE if device.type == "cuda" else _CPU_SHARE
    budget = int(free_bytes(device) * share if given is None else given * 2**30)
    prefix_bytes = budget // 4  # for the prefix cache
    kv_tokens = min((budget - prefix_bytes) // position_bytes, config.max_batch_size * wanted)
    if kv_tokens < 2:
        raise ArealError(f"no memory for a KV cache: one position takes {position_bytes} bytes of {budget}")
    if kv_tokens < wanted:
        if config.max_model_len:
            raise ArealError(
                f"--max-model-len {wanted} needs {wanted * position_bytes / 2**30:.1f} GiB of KV cache, "
                f"{budget / 2**30:.1f} GiB are free for it",
                hint="lower it, or raise --kv-memory-gib",
            )
        logger.warning("the KV cache has room for %d of the model's %d positions", kv_tokens, wanted)
    return SchedulerLimits(
        max_rows=config.max_batch_size,
        max_length=min(wanted, kv_tokens),
        kv_tokens=kv_tokens,
        prefill_tokens=config.prefill_tokens,
        kept_tokens=min(prefix_bytes // position_bytes, kv_tokens // 4),
    )


def _warm_up(runner: ModelRunner) -> None:
    """Initialize the libraries with one prefill and one decode step, so that no request waits for it."""
    import torch

    from areal.services.inference.engines.embedded.decoder import RowSpan

    runner.reserve(1, 4)
    runner.prefill([[0, 0]], [0], 0)
    token, position = torch.zeros(1, dtype=torch.int64, device=runner.device), torch.full((1,), 2, device=runner.device)
    runner.decode(token, position, (RowSpan(0, 1, 3, even=True),))
