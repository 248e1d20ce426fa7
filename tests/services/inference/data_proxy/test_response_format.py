"""How clients say that an answer is to be held to a schema."""

from __future__ import annotations

import pytest

from areal.services.inference.data_proxy.fields import Fields
from areal.services.inference.data_proxy.sampling_fields import read_answering
from areal.services.inference.engines.base import Capabilities
from areal.services.web.errors import ApiError

SCHEMA = {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}}


def test_schema_beside_json_object_is_one_that_the_answer_is_held_to() -> None:
    fields = Fields({"response_format": {"type": "json_object", "schema": SCHEMA}})
    wanted = read_answering(fields, None, Capabilities(response_format=True)).response_format
    assert wanted is not None and wanted["type"] == "json_schema" and wanted["json_schema"]["schema"] == SCHEMA


def test_schema_that_is_none_is_refused() -> None:
    fields = Fields({"response_format": {"type": "json_object", "schema": "mood"}})
    with pytest.raises(ApiError) as refused:
        read_answering(fields, None, Capabilities(response_format=True))
    assert refused.value.status == 400
