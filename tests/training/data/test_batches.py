import pytest
import torch

from areal.rollout.tensors import concat_padded_tensors
from areal.training.data.batches import lengths, select, trimmed


def _batch(*texts: str) -> dict[str, torch.Tensor]:
    width = max(map(len, texts))
    ids = torch.tensor([[ord(c) for c in text.ljust(width, "\0")] for text in texts])
    return {"input_ids": ids, "attention_mask": ids != 0, "versions": torch.zeros_like(ids), "rewards": ids[:, 0]}


def test_concat_pads_to_the_widest_with_each_columns_own_padding() -> None:
    got = concat_padded_tensors([_batch("ab"), _batch("wxyz")])
    assert lengths(got) == [2, 4]
    assert got["input_ids"].shape == (2, 4)
    assert got["versions"].tolist() == [[0, 0, -1, -1], [0, 0, 0, 0]]
    assert got["rewards"].tolist() == [ord("a"), ord("w")]


def test_concat_of_different_columns_names_them() -> None:
    with pytest.raises(ValueError, match="rewards"):
        concat_padded_tensors([_batch("a"), {"attention_mask": torch.ones(1, 1)}])


def test_select_is_no_wider_than_what_was_selected() -> None:
    got = select(_batch("abcd", "xy", "z"), [2, 1])
    assert got["input_ids"].tolist() == [[ord("z"), 0], [ord("x"), ord("y")]]


def test_trimmed_an_empty_batch_keeps_one_column() -> None:
    assert trimmed({"attention_mask": torch.zeros(2, 5)})["attention_mask"].shape == (2, 1)
