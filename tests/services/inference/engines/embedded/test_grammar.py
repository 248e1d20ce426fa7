"""Answers held to a schema: always JSON of that schema when they end by themselves, logprobs those of the raw model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import validate
from tokenizers import Tokenizer, decoders, models

from areal.errors import ArealError, UsageFault
from areal.services.inference.engines.embedded.grammar import Grammars, Matcher
from areal.services.inference.engines.embedded.scheduler import Finish
from tests.services.tokenizer_folder import write_tokenizer

from .process import EXAMPLE
from .support import Harness, gap, make_model

Start = Callable[..., Harness]
END = 2  # <|im_end|>
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}, "count": {"type": "integer"}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("grammar")
    model = make_model(path, "Llama", vocab_size=330)  # some tokens more than the tokenizer's 320
    write_tokenizer(path)
    return path, model


@pytest.fixture(scope="module")
def grammars(folder: tuple[Path, Any]) -> Grammars:
    return Grammars(folder[0], 330, {END})


def test_random_model_follows_schema_with_tempered_logprobs(
    folder: tuple[Path, Any], grammars: Grammars, start: Start
) -> None:
    path, model = folder
    harness, tokenizer = start(path), Tokenizer.from_file(str(path / "tokenizer.json"))
    matcher = grammars.matcher(JSON_SCHEMA)
    assert matcher is not None
    sequences = [
        harness.submit([5, 6], seed=seed, stop_token_ids=(END,), temperature=0.5, matcher=matcher.fork())
        for seed in range(6)
    ]
    free = harness.submit([5, 6], seed=1, max_new_tokens=20)
    harness.wait(*sequences, free)
    whole = [each for each in sequences if each.finish is Finish.STOP]
    assert whole, [each.finish for each in sequences]
    for sequence in whole:
        validate(json.loads(tokenizer.decode(sequence.output[:-1])), SCHEMA)
    assert all(gap(model, each, 0.5) < 1e-4 for each in sequences) and gap(model, free) < 1e-4


def test_json_object_is_any_object(folder: tuple[Path, Any], grammars: Grammars, start: Start) -> None:
    harness, tokenizer = start(folder[0]), Tokenizer.from_file(str(folder[0] / "tokenizer.json"))
    sequence = harness.submit(
        [7],
        temperature=0.0,
        logit_bias={95: 20.0},
        stop_token_ids=(END,),
        matcher=grammars.matcher({"type": "json_object"}),
    )
    harness.wait(sequence)
    assert tokenizer.id_to_token(95) == "}" and json.loads(tokenizer.decode(sequence.output[:-1])) == {}


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"type": "regex", "regex": "(ab|ba){2}[0-9]"}, "(ab|ba){2}[0-9]"),
        ({"type": "choice", "choice": ["yes", 'no "way"']}, 'yes|no "way"'),
        ({"type": "grammar", "grammar": 'root ::= "a" ("b" | "c") "d"'}, "a[bc]d"),
    ],
)
def test_random_model_follows_constraint(
    folder: tuple[Path, Any], grammars: Grammars, start: Start, wanted: dict[str, Any], pattern: str
) -> None:
    harness, tokenizer = start(folder[0]), Tokenizer.from_file(str(folder[0] / "tokenizer.json"))
    matcher = grammars.matcher(wanted)
    assert matcher is not None
    sequences = [harness.submit([5], seed=seed, stop_token_ids=(END,), matcher=matcher.fork()) for seed in range(4)]
    harness.wait(*sequences)
    for sequence in sequences:
        text = tokenizer.decode([token for token in sequence.output if token != END])
        assert re.fullmatch(pattern, text), text


Encode = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def encode(folder: tuple[Path, Any]) -> Encode:
    tokenizer = Tokenizer.from_file(str(folder[0] / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def accepts(matcher: Matcher, tokens: list[int]) -> bool:
    """Whether the tokens are a whole answer."""
    faults = [matcher.observe(token) for token in tokens]
    return not any(faults) and matcher.observe(END) is None


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=8), st.text(max_size=6))
def test_choice_accepts_only_its_texts(grammars: Grammars, encode: Encode, texts: list[str], other: str) -> None:
    matcher = grammars.matcher({"type": "choice", "choice": texts})
    assert matcher is not None
    for text in {*texts, other, *(text[:-1] for text in texts)} - {""}:
        assert accepts(matcher.fork(), encode(text)) is (text in texts), text


def test_choice_of_many_texts_accepts_each(grammars: Grammars, encode: Encode) -> None:
    texts = [f"{number * 7919 % 20_000} answer {number}" for number in range(20_000)]
    matcher = grammars.matcher({"type": "choice", "choice": texts})
    assert matcher is not None
    assert all(accepts(matcher.fork(), encode(text)) for text in texts[::997])
    assert not accepts(matcher.fork(), encode("7919 answer 2"))


def many_rules(start: str) -> dict[str, Any]:
    """A grammar of more rules after ``start`` than llguidance keeps in one row of its parser."""
    rules = "\n".join(f'w{number} ::= "a{number}"' for number in range(2500))
    names = " | ".join(f"w{number}" for number in range(2500))
    return {"type": "grammar", "grammar": f"root ::= {start} ({names}) [b-z]\n{rules}"}


def test_grammar_beyond_library_limit_reports_library_error(grammars: Grammars, encode: Encode) -> None:
    with pytest.raises(UsageFault, match="max is 2000"):
        grammars.matcher(many_rules(""))
    matcher = grammars.matcher(many_rules("[xy] [b-z]"))
    assert matcher is not None
    faults = [matcher.observe(token) for token in encode("xba")]
    fault = next(filter(None, faults))
    assert fault.startswith("the grammar stopped: InternalError: ") and "max is 2000" in fault


def test_plain_text_has_no_matcher(grammars: Grammars) -> None:
    assert grammars.matcher({"type": "text"}) is None and grammars.matcher({}) is None


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": 3}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "nosuch"}}},
        {"type": "regex", "regex": "(a"},
        {"type": "grammar", "grammar": "root ::= missing"},
    ],
)
def test_rejects_invalid_schema(grammars: Grammars, wanted: dict[str, Any]) -> None:
    with pytest.raises(UsageFault, match="response_format"):
        grammars.matcher(wanted)


def test_model_without_needed_tokens_ends_in_dead_end(tmp_path: Path, start: Start) -> None:
    vocabulary = {text: number for number, text in enumerate(["<end>", *"0123456789"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    make_model(tmp_path, vocab_size=11, bos_token_id=None, eos_token_id=0)
    matcher = Grammars(tmp_path, 11, {0}).matcher({"type": "regex", "regex": "[0-9]x"})
    (sequence,) = start(tmp_path).run([1, 5], max_new_tokens=8, matcher=matcher)
    assert sequence.finish is Finish.DEAD_END and "NoExtensionBias" in sequence.fault


def test_quickstart_model_follows_constraint(start: Start) -> None:
    grammars, tokenizer = Grammars(EXAMPLE, 16, {2}), Tokenizer.from_file(str(EXAMPLE / "tokenizer.json"))
    make = partial(grammars.matcher, {"type": "regex", "regex": "[0-3]{3}=[4-9]"})
    harness = start(EXAMPLE)
    sequences = [harness.submit([5], seed=seed, stop_token_ids=(2,), matcher=make()) for seed in range(4)]
    harness.wait(*sequences)
    for sequence in sequences:
        assert re.fullmatch("[0-3]{3}=[4-9]", tokenizer.decode(sequence.output)), sequence.output
    with pytest.raises(UsageFault, match="this model has no tokens to write it"):
        grammars.matcher({"type": "json_object"})


def test_unsupported_tokenizer_disables_grammars_with_reason(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ArealError, match="cannot read"):
        Grammars(tmp_path, 1, {0})


@pytest.mark.parametrize("ends", [set(), {END}])
def test_folder_without_tokenizer_or_end_disables_grammars(tmp_path: Path, ends: set[int]) -> None:
    if not ends:
        write_tokenizer(tmp_path)
    with pytest.raises(ArealError, match="no grammars"):
        Grammars(tmp_path, 320, ends)
