"""What AReaL's examples and documentation import: provided here, or refused with what to use instead."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal.compat import UNSUPPORTED
from areal.errors import UsageFault

NAMES = [tuple(line.split()) for line in Path(__file__).with_name("areal_names.txt").read_text().splitlines()]


def imported(module: str, name: str) -> object:
    """``from module import name``."""
    found: dict[str, object] = {}
    exec(f"from {module} import {name}", found)
    return found[name]


@pytest.mark.parametrize(("module", "name", "how"), NAMES)
def test_areal_name_is_provided_or_refused_with_alternative(module: str, name: str, how: str) -> None:
    if how == "provided":
        assert imported(module, name) is not None
        return
    with pytest.raises(ImportError, match=r"of AReaL is not provided: \w.{20,}"):
        imported(module, name)


def test_every_refused_name_raises() -> None:
    for key in UNSUPPORTED:
        module, _, name = key.partition(":")
        with pytest.raises(ImportError, match="is not provided"):
            if name:
                imported(module, name)
            else:
                importlib.import_module(f"{module}.any")


def test_second_engine_of_driver_is_a_running_server() -> None:

    RemoteSGLangEngine: Any = imported("areal.engine.sglang_remote", "RemoteSGLangEngine")
    from areal.api.cli_args import InferenceEngineConfig

    config = InferenceEngineConfig(backend="sglang:d1", gateway_addr="http://judge:1/v1")
    controller = RemoteSGLangEngine.as_controller(config, None)
    controller.initialize(role="judge", server_args={})
    controller.start_proxy()
    controller.start_proxy_gateway()
    assert controller.proxy_gateway_addr == "http://judge:1/v1"
    controller.destroy()
    with pytest.raises(UsageFault, match="the server of sglang:d1 is not given") as raised:
        RemoteSGLangEngine.as_controller(InferenceEngineConfig(backend="sglang:d1"))
    assert "gateway_addr=" in str(raised.value.hint)
    with pytest.raises(UsageFault, match="an InferenceService runs the engines"):
        RemoteSGLangEngine(config)


def test_unknown_name_raises_ordinary_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named .areal\.no_such."):
        importlib.import_module("areal.no_such")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        imported("areal.infra", "nothing")


def test_alias_is_same_object_by_import_pickle_and_string() -> None:
    from areal import PPOTrainer
    from areal.loading import load_attr

    assert importlib.import_module("areal.trainer").PPOTrainer is PPOTrainer
    assert pickle.loads(b"careal.trainer\nPPOTrainer\n.") is PPOTrainer  # noqa: S301
    assert load_attr("areal.trainer.PPOTrainer") is load_attr("areal.trainer:PPOTrainer") is PPOTrainer
    assert imported("areal.utils.dynamic_import", "import_from_string") is load_attr


def test_names_are_imported_lazily() -> None:
    code = "import areal, areal.api, sys; print([m for m in ('torch', 'areal.compat', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_model_allocation_is_read() -> None:
    from areal.api import ModelAllocation

    found = ModelAllocation.from_str("sglang:d4t2", name="rollout")
    assert (found.backend, found.parallel.dp_size, found.parallel.tp_size) == ("sglang", 4, 2)
    assert found.parallel.world_size == 8


def test_traced_scopes_record_run_timings() -> None:
    from areal.api import stats
    from areal.utils.perf_tracer import Category, trace_perf, trace_scope

    stats.get().export()

    @trace_perf("work", category=Category.COMPUTE)
    def work() -> int:
        return 3

    with trace_scope("outer", Category.IO, {"n": 1}):
        assert work() == 3
    assert {"timeperf/work", "timeperf/outer"} <= stats.get().export().keys()


def test_table_of_numbers_is_aligned() -> None:
    from areal.utils.printing import tabulate_stats

    assert tabulate_stats({"reward": 0.5, "n": 2}, floatfmt=".1f") == "reward  0.5\nn       2.0"


def test_math_verify_worker_compares_answers() -> None:
    from areal.reward import get_math_verify_worker

    worker = get_math_verify_worker()
    assert (worker.verify(r"\boxed{\frac{36}{2}}", "18"), worker.verify(r"\boxed{18, 19}", "18")) == (1.0, 0.0)


def test_chat_template_gives_ids_or_text() -> None:
    from areal.utils.hf_utils import apply_chat_template, load_hf_tokenizer

    tokenizer = load_hf_tokenizer(str(Path(__file__).parents[2] / "examples" / "reverse_digits" / "model"))
    messages = [{"role": "user", "content": "1234"}]
    ids = apply_chat_template(tokenizer, messages, add_generation_prompt=True)
    assert isinstance(ids, list) and all(isinstance(token, int) for token in ids)
    text = apply_chat_template(tokenizer, messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str) and "1234" in text
