"""Importing this makes megatron-core run on CPUs: its few calls of CUDA go to the CPU. It is for tests of logic; the
product refuses a machine without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        return func(*args, **kwargs)


class _Stream:
    """All that is asked of it has happened."""

    def wait_stream(self, other: Any) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None: ...


_STREAM = _Stream()


def _set(place: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(place, name, value)


_set(
    torch.cuda,
    current_device=lambda: _CPU,
    synchronize=lambda *_, **__: None,
    manual_seed=torch.manual_seed,
    get_rng_state=lambda *_, **__: torch.get_rng_state(),
    set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    empty_cache=lambda: None,
    Stream=_Stream,
    current_stream=lambda *_: _STREAM,
    stream=lambda *_: nullcontext(),
    **{f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in ("Float", "Double", "BFloat16", "Int", "Long")},
)
torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
for moved in (torch.Tensor, torch.nn.Module):
    moved.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
_type = torch.Tensor.type


def _as_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    found = _type(self, *args, **kwargs)
    return f"torch.cuda.{found.rpartition('.')[2]}" if isinstance(found, str) else found


torch.Tensor.type = _as_cuda  # type: ignore[method-assign,assignment]

import megatron.core.tensor_parallel.random as _random  # noqa: E402
import megatron.core.transformer.moe.token_dispatcher as _dispatcher  # noqa: E402

_set(
    _random,
    _get_cuda_rng_state=lambda *_, **__: torch.get_rng_state(),
    _set_cuda_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
)


def _moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


_set(_dispatcher, maybe_move_tensor_to_cpu=_moved)
_CudaIsCpu().__enter__()
