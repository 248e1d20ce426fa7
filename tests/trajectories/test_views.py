"""What a viewer shows: the tree, the tokens, and nothing that a model could do to a terminal or a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import ArealError, NotFound
from areal.terminal import spelled
from areal.trajectories.record import Episode, Interaction
from areal.trajectories.render import Paint, render_terminal
from areal.trajectories.view import (
    Stretch,
    TokenDecoder,
    load_decoder,
    shown_episode,
    stretches,
    text_of_messages,
    turns,
)
from areal.ui.page import harmless, render_html
from tests.services.tokenizer_folder import write_tokenizer
from tests.trajectories.samples import branched, external, interaction

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)> \x1b[31m\x07\u202e\u2028 & ' \""


def letters(text: str = "") -> TokenDecoder:
    """Each id is a letter; id 9 is ``text``."""
    return TokenDecoder(lambda ids: "".join(text if text and each == 9 else chr(96 + each) for each in ids), "letters")


def test_turn_shows_only_text_new_since_parent() -> None:
    shown = turns(branched(), letters())
    assert [(turn.number, turn.depth, turn.shown_before) for turn in shown] == [
        ("1", 0, 0),
        ("2a", 1, 3),
        ("2b", 1, 3),
        ("3b", 1, 5),
    ]
    assert ["".join(token.text or "" for token in turn.tokens) for turn in shown] == ["abc", "de", "fg", "hi"]
    assert [turn.versions for turn in shown] == [[3], [4], [3], [3]]


def test_unrelated_conversations_branch_from_start() -> None:
    first, *_ = branched().interactions
    several = replace(branched(), interactions=(first, replace(first, interaction_id="z", parent_id="gone")))
    assert [turn.number for turn in turns(several, None)] == ["1a", "1b"]


def test_branching_conversation_shape_is_drawn_first() -> None:
    episode = branched()
    text = render_terminal(episode, turns(episode, letters()), paint=None)
    assert text.splitlines()[1:4] == ["  └─ 1", "     ├─ 2a  reward 0", "     └─ 2b … 3b  reward 1"]
    line = replace(episode, interactions=episode.interactions[:2])
    assert "─" not in render_terminal(line, turns(line, letters()), paint=None)


def test_many_samples_of_prompt_have_distinct_names() -> None:
    rows = tuple(interaction(str(place), [1], [2]) for place in range(80))
    conversation = turns(replace(branched(), interactions=rows), None)
    assert len({turn.number for turn in conversation}) == 80
    assert {turn.depth for turn in conversation} == {1}
    assert (conversation[24].number, conversation[25].number, conversation[79].number) == ("1y", "1za", "1zzze")
    assert len(stretches(conversation)) == 80


@given(st.lists(st.integers(-1, 20), max_size=12))
def test_every_turn_is_in_one_stretch_after_parent(parents: list[int]) -> None:
    rows = tuple(
        interaction(str(place), [1], [2], parent=str(parent) if 0 <= parent < place else None)
        for place, parent in enumerate(parents)
    )
    conversation = turns(replace(branched(), interactions=rows), None)
    assert sorted(turn.row.interaction_id for turn in conversation) == sorted(row.interaction_id for row in rows)
    seen: list[str] = []

    def walk(found: tuple[Stretch, ...]) -> None:
        for stretch in found:
            for turn in stretch.turns:
                parent = turn.row.parent_id
                assert parent is None or parent in seen
                seen.append(turn.row.interaction_id)
            walk(stretch.branches)

    walk(stretches(conversation))
    assert sorted(seen) == sorted(row.interaction_id for row in rows)


@given(st.text(max_size=40), st.integers(1, 4))
def test_row_pieces_join_to_text_for_any_token_bytes(text: str, width: int) -> None:
    data = text.encode("utf-8", "surrogatepass")
    parts = [data[at : at + width] for at in range(0, len(data), width)]
    decoder = TokenDecoder(lambda ids: b"".join(parts[each] for each in ids).decode("utf-8", "replace"), "bytes")
    pieces = decoder.texts(range(len(parts)))
    assert len(pieces) == len(parts)
    if "\ufffd" not in data.decode("utf-8", "replace"):
        assert "".join(pieces) == text


def test_decoder_uses_model_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = write_tokenizer(tmp_path / "model")
    text = "<|im_start|>user\nnaïve 日本<|im_end|>"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    pieces = load_decoder(folder).texts(ids)
    assert (len(pieces), "".join(pieces), pieces[0]) == (len(ids), text, "<|im_start|>")
    with pytest.raises(NotFound):
        load_decoder(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ArealError, match="cannot read the tokenizer"):
        load_decoder(folder)


def test_terminal_without_colours_uses_words() -> None:
    episode = branched()
    text = render_terminal(episode, turns(episode, letters()), paint=None)
    assert "\x1b" not in text
    assert "episode 0-0  ·  reward 1  ·  4 turns" in text
    assert "  [3b] d  reward 1  stop  mean logprob -0.5  temperature 1  version 3" in text
    assert "    (5 tokens as above)\n    prompt:\n      h\n    answer:\n      i" in text


@pytest.mark.parametrize(("paint", "code"), [("logprob", 208), ("version", 214)])
def test_terminal_paints_tokens_by_requested_value(paint: Paint, code: int) -> None:
    episode = branched()
    text = spelled(render_terminal(episode, turns(episode, letters()), paint=paint), "\x1b")
    painted = "g" if paint == "logprob" else "e"
    assert f"\x1b[38;5;{code}m{painted}\x1b[0m" in text


@pytest.mark.parametrize("paint", ["logprob", "mask", None])
def test_terminal_escapes_model_control_characters(paint: Paint | None) -> None:
    episode = replace(branched(), episode="\x1b]0;x\x07")
    text = spelled(render_terminal(episode, turns(episode, letters(HOSTILE)), paint=paint), "\x1b")
    left = re.sub(r"\x1b\[(?:0|1|2|38;5;\d+)m", "", text)
    assert not [each for each in left if each != "\n" and not each.isprintable()]
    assert "\\x1b[31m\\x07\\u{202e}\\u{2028}" in text


def test_ids_are_shown_without_tokenizer() -> None:
    episode = branched()
    assert "      6\n" in render_terminal(episode, turns(episode, None), paint=None)
    assert '"texts":[null,null,null]' in render_html([episode], None, title="t")[0]


def test_external_model_messages_are_shown_unchanged() -> None:
    episode = external()
    assert "  user: <b>hi</b>\n  assistant: ho" in render_terminal(episode, turns(episode, None), paint=None)


def test_hostile_role_and_failure_are_escaped() -> None:
    reply = {"role": "assistant", "content": "ho"}
    row = Interaction("x", messages=[{"role": HOSTILE, "content": "hi"}], response=reply)
    episode = replace(external(), interactions=(row,), failures=({"code": HOSTILE, "count": 1},))
    text = render_terminal(episode, turns(episode, None), paint=None)
    assert not [each for each in text if each != "\n" and not each.isprintable()]


class _Page(HTMLParser):
    """What a browser would make of the page: elements, and the text of each script."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts[-1] += data


def parsed(text: str) -> _Page:
    reader = _Page()
    reader.feed(text)
    return reader


def test_external_tool_calls_are_one_line_each() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city":\n "Rome"}'}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call, call]}
    row = Interaction("x", messages=[{"role": "user", "content": "hi"}], response=reply)
    line = '-> weather({"city": "Rome"})'
    assert text_of_messages(row) == [("user", "hi"), ("assistant", f"{line}\n{line}")]


def test_page_embeds_hostile_text_only_as_data() -> None:
    hostile = replace(branched(), episode=HOSTILE, example={HOSTILE: HOSTILE}, answer=HOSTILE)
    innocent = parsed(render_html([branched()], letters(), title="t")[0])
    attacked = parsed(render_html([hostile, external()], letters(HOSTILE), title=HOSTILE)[0])
    assert attacked.tags == innocent.tags
    data = json.loads(attacked.scripts[0])
    assert (data["title"], data["episodes"][0]["name"]) == (HOSTILE, HOSTILE)
    assert data["episodes"][0]["turns"][-1]["texts"][-1] == HOSTILE
    assert attacked.scripts[1] == innocent.scripts[1]


def test_page_needs_no_network_and_allows_only_own_script() -> None:
    reader = parsed(render_html([branched()], letters(), title="t")[0])
    assert not [value for name, value in reader.attributes if name in ("src", "href")]
    policy = next(
        value or "" for name, value in reader.attributes if name == "content" and "script-src" in (value or "")
    )
    digest = base64.b64encode(hashlib.sha256(reader.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert "innerHTML" not in reader.scripts[1] and "eval" not in reader.scripts[1]


def test_page_is_bounded_and_reports_omissions() -> None:
    many = [replace(branched(), episode=f"e-{number}") for number in range(100)]
    text, count = render_html(many, letters(), title="learn", left_out="rest", most_bytes=20_000)
    data = json.loads(parsed(text).scripts[0])
    assert 1 < count == len(data["episodes"]) < 100 and data["title"] == "learn"
    assert data["leftOut"] == f"{100 - count} more would make this page larger than 0 MB. rest"
    assert data["episodes"][0]["hint"], "the list shows the model's answer"


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here to read the script")
def test_page_script_is_valid_javascript(tmp_path: Path) -> None:
    script = tmp_path / "page.mjs"
    script.write_text(parsed(render_html([branched()], letters(), title="t")[0]).scripts[1], encoding="utf-8")
    checked = subprocess.run(["node", "--check", str(script)], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr


@given(st.recursive(st.text() | st.floats(allow_nan=False, allow_infinity=False) | st.none(), st.lists))
def test_embedded_data_round_trips_without_closing_its_element(document: object) -> None:
    text = harmless(document)
    assert json.loads(text) == document
    assert not set("<>&\u2028\u2029") & set(text)


def test_multi_turn_row_counts_and_names_each_turn() -> None:
    row = interaction("a", [1, 2], [3, 4, 5, 6])
    row = replace(row, loss_mask=[0, 0, 1, 0, 1, 1], turn_ids=[-1, -1, 0, -1, 1, 1])
    episode = Episode("t-0/1", (row,), 0, 1, 0.0, group="t-0", step=3)
    text = render_terminal(episode, turns(episode, None), paint=None)
    assert "2 turns" in text and "answer of turn 1:" in text and "answer of turn 2:" in text
    assert "training step 3  ·  sample 1 of group t-0" in text
    (turn,) = shown_episode(episode, None)["turns"]
    assert (turn["number"], turn["depth"], turn["mask"], turn["turns"]) == ("1", 0, "001011", [0, 1, 1])
    (turn,) = shown_episode(replace(episode, interactions=(replace(row, turn_ids=[-1, -1, 0, -1, 0, 0]),)), None)[
        "turns"
    ]
    assert turn["turns"] is None, "one turn needs no names"
