"""Declares two operators of torchvision's native library before torchvision is imported: its wheels do not load beside
a PyTorch for CPUs, and SGLang imports it for models of images, which are not served here."""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

_OPERATORS = ("nms", "qnms")
_kept: list[Any] = []


class _Declare(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            _kept.append(torch.library.Library("torchvision", "DEF"))
            for operator in _OPERATORS:
                _kept[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _Declare())
