"""The data sets of the example tldr: those of the hub become the same conversations as the example's own rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from areal.api.cli_args import DatasetConfig
from areal.dataset import get_custom_dataset
from areal.dataset.tokenizers import load_hf_tokenizer
from tests.hub_standin import hub_standin

TLDR = Path(__file__).resolve().parents[2] / "examples" / "tldr"


def texts(rows: list[dict[str, object]]) -> bytes:
    """The rows as the hub has them: the prompt is a text."""
    flat = [{**row, "prompt": row["prompt"][0]["content"]} for row in rows]  # type: ignore[index]
    return "".join(f"{json.dumps(row)}\n" for row in flat).encode()


@pytest.mark.parametrize(
    ("function", "kind", "own", "repository"),
    [("posts", "sft", "posts", "trl-lib/tldr"), ("pairs", "rw", "pairs", "trl-lib/tldr-preference")],
)
def test_hub_rows_have_conversation_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, kind: str, own: str, repository: str
) -> None:
    monkeypatch.syspath_prepend(str(TLDR))
    monkeypatch.delitem(sys.modules, "data", raising=False)
    tokenizer = load_hf_tokenizer(str(TLDR / "model"))
    rows = [json.loads(line) for line in (TLDR / own / "train.jsonl").read_text().splitlines()[:5]]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    wanted = get_custom_dataset(path=str(tmp_path / "train.jsonl"), type=kind, tokenizer=tokenizer)
    with hub_standin() as hub:
        hub.repository(repository, kind="dataset").push({"train.jsonl": texts(rows)}, "first")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        config = DatasetConfig(path=f"data:{function}", type=kind)
        found = get_custom_dataset("train", config, tokenizer)
    assert list(found) == list(wanted)
