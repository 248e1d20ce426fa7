"""The checked-in example model: its tokenizer, its template, and an accuracy that leaves room to learn."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from areal.services.inference.engines.embedded.loading import inspect_folder
from areal.services.inference.engines.embedded.model_folder import end_tokens, read_config
from areal.services.inference.engines.embedded.scheduler import SchedulerLimits

from .process import EXAMPLE, PROMPT
from .support import Harness

Start = Callable[..., Harness]
LIMITS = SchedulerLimits(max_rows=64, max_length=128, kv_tokens=64 * 128)


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[tokenizers.Tokenizer]:
    yield tokenizers.Tokenizer.from_file(str(EXAMPLE / "tokenizer.json"))


def test_prompt_template_ends_at_start_of_answer() -> None:
    library: Any = transformers
    tokenizer = library.AutoTokenizer.from_pretrained(EXAMPLE)
    question = [{"role": "user", "content": "1234"}]
    assert tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"] == PROMPT
    turns = [*question, {"role": "assistant", "content": "4321"}, {"role": "user", "content": "77"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "<bos>1234=4321<eos>77="


def test_tokenizer_of_the_folder_keeps_text(tokenizer: tokenizers.Tokenizer) -> None:
    assert tokenizer.encode("<bos>1234=").ids == PROMPT
    assert tokenizer.decode([8, 7, 6, 5, 2]) == "4321"


def test_sampled_accuracy_leaves_room_to_learn(start: Start, tokenizer: tokenizers.Tokenizer) -> None:
    draw = random.Random(0)
    questions = ["".join(draw.choices("0123456789", k=4)) for _ in range(600)]
    harness = start(EXAMPLE, limits=LIMITS)
    (end,) = end_tokens(EXAMPLE, read_config(EXAMPLE))
    sequences = [
        harness.submit(tokenizer.encode(f"<bos>{question}=").ids, seed=number, max_new_tokens=8, stop_token_ids=(end,))
        for number, question in enumerate(questions)
    ]
    harness.wait(*sequences)
    right = [
        tokenizer.decode(sequence.output) == question[::-1]
        for sequence, question in zip(sequences, questions, strict=True)
    ]
    assert 0.1 <= sum(right) / len(right) <= 0.3


@pytest.mark.slow
def test_make_model_writes_servable_folder(tmp_path: Path) -> None:
    script = EXAMPLE.parent / "make_model.py"
    done = subprocess.run(
        [sys.executable, str(script), "--out", str(tmp_path / "model"), "--target", "0.01"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "84288 parameters" in done.stdout
    assert inspect_folder(tmp_path / "model").config is not None
