"""A trainer as a process of its own, for tests that kill it: publishes version 1, and dies while it publishes 2.

    python trainer_process.py FOLDER MODE KEY_FILE PROXY_URL WHEN

``WHEN``: ``writing`` (its own files), or ``sending`` (workers have been told).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from areal.services.http.auth import load_admin_key
from areal.services.weight_update.publisher import TrainerPair, serve_endpoint
from areal.services.weight_update.staging import open_publisher
from areal.training.run_folder import config_files
from areal.training.services import weight_update_gateway
from tests.services.weight_update.conftest import MODEL, model, probe_of, weights


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def cut(held: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from held[: len(held) // 2]
    die()


def main(folder: str, mode: str, key_file: str, proxy: str, when: str) -> None:
    publisher = open_publisher(mode, Path(folder) / "weights", config_files(MODEL))
    key = Path(key_file)
    with weight_update_gateway(Path(folder), key, Path(folder) / "gateway.log") as gateway:
        with serve_endpoint({"actor": publisher}, load_admin_key(key_file)) as endpoint:
            worker = {"inference_worker_urls": [proxy]}
            pair = TrainerPair("actor", mode, gateway, endpoint, worker, publisher, key.read_text())
            pair.connect()
            pair.publish(1, weights(first := model(1)), probe_of(first))
            print("published 1", flush=True)
            if when == "sending":
                publisher.send = die  # type: ignore[method-assign,assignment]
                publisher.published = die if mode == "disk" else publisher.published  # type: ignore[method-assign,assignment]
                pair.publish(2, weights(model(2)))
            else:
                pair.publish(2, cut(weights(model(2))))


if __name__ == "__main__":
    main(*sys.argv[1:])
