"""AReaL's import path of ``set_random_seed``."""

from __future__ import annotations

import random
from hashlib import sha256


def set_random_seed(base_seed: int, key: str = "") -> None:
    """Seed Python, NumPy and PyTorch. Each ``key`` (a role and its rank) gets a different seed."""
    import numpy as np
    import torch

    seed = base_seed + int.from_bytes(sha256(key.encode()).digest()[:4], "big") if key else base_seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
