"""A served model for clients of any environment: a random one, so that what it says is noise, but its API is real.

    python -m tests.clients.serve FOLDER

Prints its URL and key as one line of JSON, and serves until its standard input ends. Needs areal's extras ``embedded``
and ``structured``; the clients need not be installed beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.services.inference.data_proxy.dialects.talks import TEMPLATE
from tests.services.inference.engines.embedded.support import make_model
from tests.services.processes import Processes, wait_ready, wait_until
from tests.services.tokenizer_folder import write_tokenizer

MODEL = "tiny"


def main() -> None:
    folder = Path(sys.argv[1])
    processes, model = Processes(folder), folder / "model"
    make_model(
        model,
        "Qwen3",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=131072,
        bos_token_id=None,
        eos_token_id=2,
    )
    write_tokenizer(model, template=TEMPLATE)
    try:
        engine = processes.service("engines.embedded", "--model-path", str(model))
        wait_ready(engine)
        flags = ("--model", MODEL, "--engine", "embedded", "--engine-url", engine.url, "--tokenizer-path", str(model))
        proxy = processes.service(
            "data_proxy", *flags, "--tool-call-parser", "hermes", "--state-dir", str(folder / "state")
        )
        router = processes.router()
        gateway = processes.gateway(router)
        wait_ready(proxy)
        processes.register(router, proxy, model=MODEL)
        listed = lambda: MODEL in gateway.call("GET", "/v1/models", key=processes.key).json()["models"]  # noqa: E731
        wait_until(listed, what="the model is listed")
        print(json.dumps({"url": gateway.url, "key": processes.key, "folder": str(model)}), flush=True)
        sys.stdin.read()
    finally:
        processes.stop()


if __name__ == "__main__":
    main()
