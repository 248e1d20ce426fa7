"""The families that the other tests here rest on: each tokenizer has its family's tokens and loads from its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.services.inference.data_proxy.tokenizer import load_codec
from tests.conversation.families import families


def test_all_families_of_wheel_exist() -> None:
    assert len(families()) >= 45


@pytest.mark.parametrize("name", families())
def test_family_folder_loads_with_its_end_ids_and_equal_tokens(name: str, tmp_path: Path) -> None:
    family = families()[name]
    codec = load_codec(str(family.write_folder(tmp_path)))
    assert codec.chat is not None
    assert codec.end_ids >= {family.id_of(family.ends.eos), *family.generation_ends}
    text = "and the rain" + "".join(family.special) + " 日本 🙂"
    ids = codec.encode(text, add_special_tokens=False)
    assert ids == family.tokenizer.encode(text, add_special_tokens=False)
    assert codec.decode(ids, skip_special=False) == text
