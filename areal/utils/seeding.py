"""AReaL's import path of its seeding."""

from __future__ import annotations

import random
from hashlib import sha256


def set_random_seed(base_seed: int, key: str = "") -> None:
    """Seed Python, numpy and torch. Each ``key`` (a role and its rank) has a seed of its own."""
    import numpy as np
    import torch

    seed = base_seed + int.from_bytes(sha256(key.encode()).digest()[:4], "big") if key else base_seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
