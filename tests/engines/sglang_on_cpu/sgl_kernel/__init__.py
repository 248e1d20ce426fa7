"""Stands for SGLang's kernels on a CPU, as test equipment: their package needs a GPU, or a build for AVX-512.

Only names that SGLang 0.5.23 imports on every CPU exist here, and they raise when they are called (speculative
decoding, linear attention), except ``assign_req_to_token_pool_cpu``, which is done in torch. Every other name is
missing, so that SGLang's own fallbacks in torch run: a stub in which all names exist breaks them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RAISING = {
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
    "build_tree_kernel_efficient_cpu",
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_draft_decode_metadata_cpu",
}


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start_offset: Any, end_offset: Any, out_cache_loc: Any, width: Any
) -> None:
    at = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[at : at + count].to(req_to_token.dtype)
        at += count


def missing(name: str) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} does not run on this CPU")

    call.__name__ = name
    return call


def __getattr__(name: str) -> Callable[..., None]:
    if name in RAISING:
        return missing(name)
    raise AttributeError(name)
