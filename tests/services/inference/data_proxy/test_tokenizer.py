from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal.errors import UsageFault
from areal.services.inference.data_proxy.tokenizer import load_codec
from tests.services.tokenizer_folder import write_tokenizer

USER = [{"role": "user", "content": "hi"}]


def test_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match=r"tokenizer\.json"):
        load_codec(str(tmp_path))


def test_folder_with_a_broken_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageFault, match=r"tokenizer\.json"):
        load_codec(str(tmp_path))


def test_folder_with_a_broken_configuration_is_refused_by_name(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageFault, match=r"config\.json"):
        load_codec(str(tmp_path))


def test_end_tokens_are_those_of_all_configurations(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0, "max_position_embeddings": 77}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    codec = load_codec(str(tmp_path))
    assert codec.end_ids == {0, 1, 2}
    assert codec.max_positions == 77


def test_template_of_the_folder_its_file_and_the_flag_are_taken_in_this_order(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    given = tmp_path / "mine.jinja"
    given.write_text("from the flag")
    rendered = []
    for flag in (None, str(given)):
        template = load_codec(str(tmp_path), flag).template
        assert template is not None
        rendered.append(template.render(USER, None, {}))
    assert rendered == ["from the file", "from the flag"]


def test_template_among_several_by_name_is_the_default_one(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = load_codec(str(tmp_path)).template
    assert template is not None and template.render(USER, None, {}) == "plain"


def test_template_that_is_not_valid_is_refused_with_its_line(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("ok\n{% if %}")
    with pytest.raises(UsageFault, match="line 2"):
        load_codec(str(tmp_path))


def test_template_file_that_is_missing_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="nowhere"):
        load_codec(str(write_tokenizer(tmp_path)), str(tmp_path / "nowhere"))
