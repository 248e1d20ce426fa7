from __future__ import annotations

from typing import Any

import pytest

from areal.errors import FieldError
from areal.wire.bodies import (
    ConnectPair,
    DisconnectPair,
    ExportTrajectories,
    PublishModel,
    RegisterExternal,
    SetReward,
    SetVersion,
    StartSession,
    WeightOrder,
)
from areal.wire.fields import read_fields


@pytest.mark.parametrize(
    ("cls", "body", "field"),
    [
        (ConnectPair, {"pair_name": "p", "mode": "disk"}, "offer"),
        (ConnectPair, {"pair_name": "", "mode": "disk", "offer": {}}, "pair_name"),
        (ConnectPair, {"pair_name": "p\0", "mode": "disk", "offer": {}}, "pair_name"),
        (ConnectPair, {"pair_name": "p", "mode": "smoke", "offer": {}}, "mode"),
        (ConnectPair, {"pair_name": "p", "mode": "disk", "offer": {}, "gateway": ""}, "gateway"),
        (WeightOrder, {"pair_name": "p", "version": -1}, "version"),
        (WeightOrder, {"pair_name": "p", "version": 2**63}, "version"),
        (WeightOrder, {"pair_name": "p", "version": True}, "version"),
        (WeightOrder, {"pair_name": "p", "version": None}, "version"),
        (WeightOrder, {"pair_name": "p", "version": 1, "source": []}, "source"),
        (DisconnectPair, {"pair_name": "p", "left": "weights"}, "left"),
        (StartSession, {"task_id": "a\nb"}, "task_id"),
        (StartSession, {"task_id": "t", "group_size": 1025}, "group_size"),
        (StartSession, {"task_id": "t", "api_key": "two words"}, "api_key"),
        (StartSession, {"task_id": "t", "online": 1}, "online"),
        (SetReward, {"reward": 1.0, "interaction_id": 7}, "interaction_id"),
        (ExportTrajectories, {"session_ids": ["a", "a"]}, "session_ids"),
        (ExportTrajectories, {"session_ids": ["a"], "discount": 1.5}, "discount"),
        (ExportTrajectories, {"session_ids": ["a"], "format": "csv"}, "format"),
        (RegisterExternal, {"api_key": "two words"}, "api_key"),
        (RegisterExternal, {"api": "soap"}, "api"),
    ],
)
def test_invalid_body_error_names_field(cls: type[Any], body: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        read_fields(cls, body, lenient=True)
    assert caught.value.field == field


def test_body_may_have_unknown_fields_and_null_for_a_default() -> None:
    body: dict[str, Any] = {"task_id": "t", "group_size": None, "online": None, "model": None, "metadata": {}}
    assert read_fields(StartSession, body, lenient=True) == StartSession(task_id="t")


def test_disconnect_distinguishes_missing_left_from_null() -> None:
    assert read_fields(DisconnectPair, {"pair_name": "p"}, lenient=True).left == "unknown"
    assert read_fields(DisconnectPair, {"pair_name": "p", "left": None}, lenient=True).left is None


def test_refused_value_is_shortened_in_the_message() -> None:
    with pytest.raises(FieldError) as caught:
        read_fields(StartSession, {"task_id": ["x" * 10_000]}, lenient=True)
    assert len(caught.value.problem) < 200


def test_version_only_grows_unless_it_is_forced() -> None:
    assert SetVersion(version=3).conflict(3, "here") is None and SetVersion(version=3).conflict(None, "here") is None
    assert SetVersion(version=2, force=True).conflict(3, "here") is None
    told = "here is at version 3, above 2: a version only grows, but with force: true"
    assert SetVersion(version=2).conflict(3, "here") == told


def test_external_model_is_published_under_both_names() -> None:
    assert PublishModel(model="m", data_proxy_addrs=("h:1", "http://h:1")).addrs == ["http://h:1"]
    assert PublishModel(model="m").external is None
    external = PublishModel(model="m", url="https://h/v1", provider_model="theirs").external
    assert external is not None and external.names == ("m", "theirs")
