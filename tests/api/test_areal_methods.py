"""Methods of AReaL's configuration classes that drivers call."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import pytest

from areal.api.cli_args import (
    GenerationHyperparameters,
    GRPOConfig,
    InferenceEngineConfig,
    SGLangConfig,
    vLLMConfig,
)


def test_openai_chat_args_put_rest_in_extra_body() -> None:
    gconfig = GenerationHyperparameters(
        n_samples=2, max_new_tokens=9, temperature=0.5, top_p=0.9, top_k=5, stop=["a"], seed=3, min_new_tokens=1
    )
    assert gconfig.to_openai_args_dict() == {
        "max_completion_tokens": 9,
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["a"],
        "seed": 3,
        "extra_body": {"top_k": 5, "min_tokens": 1},
    }
    assert GenerationHyperparameters(max_new_tokens=9, greedy=True).to_openai_args_dict() == {
        "max_completion_tokens": 9,
        "temperature": 0.0,
    }


def test_openai_args_omit_excluded_fields_and_fit_api() -> None:
    gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=9, top_k=5)
    excluded = ["n_samples", "top_k", "temperature"]
    assert gconfig.to_openai_args_dict(exclude_args=excluded) == {"max_completion_tokens": 9}
    assert gconfig.new(top_k=100).to_openai_args_dict(excluded[1:], api_format="responses") == {"max_output_tokens": 9}
    with pytest.raises(ValueError, match="there is no field nothing"):
        gconfig.to_openai_args_dict(exclude_args=["nothing"])


def test_server_args_combine_section_and_layout() -> None:
    sglang = SGLangConfig(model_path="m", mem_fraction_static=0.3, dtype=None, enable_metrics=True, log_requests=False)
    args = SGLangConfig.build_args(sglang_config=sglang, tp_size=2, base_gpu_id=1, port=80)
    assert args == {
        "model_path": "m",
        "mem_fraction_static": 0.3,
        "enable_metrics": True,
        "log_requests": False,
        "tp_size": 2,
        "base_gpu_id": 1,
        "port": 80,
    }
    words = SGLangConfig.build_cmd(sglang_config=sglang, tp_size=2, base_gpu_id=1, port=80)
    flags = ["--model-path", "m", "--mem-fraction-static", "0.3", "--enable-metrics"]
    flags += ["--tp-size", "2", "--base-gpu-id", "1", "--port", "80"]
    assert words == [sys.executable, "-P", "-m", "sglang.launch_server", *flags]
    args = vLLMConfig.build_args(vllm_config=vLLMConfig(model="m"), tp_size=2, pp_size=1)
    assert args == {"model": "m", "tensor_parallel_size": 2, "pipeline_parallel_size": 1}
    assert vLLMConfig.build_cmd_from_args({"model": "m"})[1:] == [
        "-P",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "m",
    ]


@dataclass
class WithJudge(GRPOConfig):
    judge: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)


def test_driver_section_keeps_its_names() -> None:
    config = WithJudge("e", "t", judge=InferenceEngineConfig(experiment_name="other"))
    assert (config.judge.experiment_name, config.judge.trial_name) == ("other", "t")
    with pytest.raises(ValueError, match="set only one of them"):
        GRPOConfig("e", "t", rollout=InferenceEngineConfig(experiment_name="other"))
