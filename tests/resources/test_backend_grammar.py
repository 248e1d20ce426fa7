"""The backend string: both spellings, what is refused and at which column."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.resources.backend_grammar import ENGINES, INFERENCE_ENGINES, BackendError, Part, parse_backend


@pytest.mark.parametrize(
    ("text", "canonical", "world"),
    [
        ("embedded", "embedded:d1", 1),
        ("sglang:d4t2", "sglang:d4t2", 8),
        ("vllm:t2", "vllm:d1t2", 2),
        ("sglang:t2d4", "sglang:d4t2", 8),
        ("megatron:d2t4p2", "megatron:d2t4p2", 16),
        ("megatron:d2t2c2e4", "megatron:d2t2c2e4", 8),
        ("sglang:d16+fsdp:d32", "sglang:d16+fsdp:d32", 48),
        ("sglang.d16p1m1+d32p2m1", "sglang:d16+megatron:d32p2", 80),
        ("sglang.d4p1m2+d8p1m1", "sglang:d4t2+fsdp:d8", 16),
    ],
)
def test_parse_backend_both_spellings_have_one_canonical_form(text: str, canonical: str, world: int) -> None:
    allocation = parse_backend(text)
    assert str(allocation) == canonical
    assert allocation.world_size == world


def test_parse_backend_tells_inference_from_training() -> None:
    allocation = parse_backend("fsdp:d8+vllm:d2t2")
    assert allocation.inference == Part("vllm", data=2, tensor=2)
    assert allocation.training == Part("fsdp", data=8)
    assert allocation.inference.devices_per_replica == 2


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 1, "an engine is missing"),
        ("sglan:d2", 1, 'did you mean "sglang"'),
        ("d4t2", 1, "does not begin with an engine, for example sglang:d4t2"),
        ("sglang:", 8, "dimensions are missing"),
        ("sglang:d", 9, "needs a number from 1 up"),
        ("sglang:d0", 9, "needs a number from 1 up"),
        ("sglang:d2x2", 10, 'unknown dimension "x"'),
        ("sglang:d2d2", 10, "given twice"),
        ("sglang:d2 t2", 10, 'expected a dimension like d2, found " "'),
        ("sglang;d2", 7, 'expected ":" after sglang'),
        ("sglang:d2+", 11, "an engine is missing"),
        ("sglang:d2+vllm:d2", 11, "both parts are inference engines"),
        ("sglang:d2+fsdp:d2+fsdp:d2", 25, "at most two parts"),
        ("fsdp:d2p2", 1, "fsdp has no pipeline parallelism"),
        ("embedded:t2", 1, "only d can be above 1"),
        ("sglang:d999999t999999", 1, "more than anyone has"),
        ("sglang:d99999999999999999999", 9, "needs a number"),
    ],
)
def test_parse_backend_bad_names_the_column(text: str, column: int, message: str) -> None:
    with pytest.raises(BackendError) as caught:
        parse_backend(text)
    assert caught.value.column == column
    assert message in caught.value.message


def test_parse_backend_of_a_model_is_one_inference_engine() -> None:
    with pytest.raises(BackendError, match="one engine only"):
        parse_backend("sglang:d2+fsdp:d2", engines=INFERENCE_ENGINES, single=True)
    with pytest.raises(BackendError, match='unknown engine "fsdp"'):
        parse_backend("fsdp:d2", engines=INFERENCE_ENGINES, single=True)


@given(st.text("sglangvmd:.+0123tpce ", max_size=24) | st.text(max_size=12))
def test_parse_backend_of_anything_parses_or_names_a_column_inside(text: str) -> None:
    try:
        allocation = parse_backend(text)
    except BackendError as error:
        assert 1 <= error.column <= len(text) + 1
    else:
        assert parse_backend(str(allocation)) == allocation


@given(st.sampled_from(ENGINES), st.integers(1, 64))
def test_parse_backend_canonical_form_is_stable(engine: str, size: int) -> None:
    allocation = parse_backend(f"{engine}:d{size}")
    assert str(parse_backend(str(allocation))) == str(allocation)
