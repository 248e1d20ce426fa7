"""The command line knows a kind by its registration alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar

import pytest
from click.shell_completion import ShellComplete

from areal.cli.main import cli
from areal.cli.options import Invocation
from areal.reconcilers.kinds import KindController
from areal.resources.fields import SpecModel
from areal.resources.kinds import KindInfo, register, unregister
from areal.resources.tree import UpdateClass
from tests.cli.conftest import Areal


class EvaluationSpec(SpecModel):
    """Scores a checkpoint."""

    suite: Annotated[str, UpdateClass.RECREATE]
    """The tasks that are run."""


class EvaluationController(KindController):
    columns: ClassVar = (("SUITE", ("spec", "suite"), False),)


@pytest.fixture(autouse=True)
def evaluation(record: Callable[..., Any]) -> Iterator[None]:
    module = EvaluationSpec.__module__
    register(
        KindInfo(
            kind="Evaluation",
            plural="evaluations",
            short=("eval",),
            order=9,
            spec=f"{module}:EvaluationSpec",
            controller=f"{module}:EvaluationController",
            components=("scorer",),
        )
    )
    record("Evaluation", "nightly", {"suite": "gsm8k"})
    yield
    unregister("Evaluation")


def completed(*words: str) -> list[str]:
    found = ShellComplete(cli, {"obj": Invocation()}, "areal", "_AREAL_COMPLETE").get_completions(
        [*words[:-1]], words[-1]
    )
    return [item.value for item in found]


def test_get_lists_new_kind_with_its_columns(areal: Areal) -> None:
    assert "Evaluation" in areal("get", "kinds").out
    assert areal("get", "eval").rows[0] == ["NAME", "READY", "STATUS", "SUITE", "AGE"]
    assert areal("get", "-o", "name").out == "evaluation/nightly\n"


def test_describe_and_explain_know_new_kind_fields(areal: Areal) -> None:
    assert "suite" in areal("describe", "evaluation/nightly").out
    assert "The tasks that are run." in areal("explain", "evaluation.spec.suite").out


def test_completion_offers_new_kind() -> None:
    assert completed("get", "eva") == ["evaluations", "evaluation", "evaluation/nightly"]
    assert completed("delete", "eval/n") == ["eval/nightly"]
    assert completed("explain", "eva") == ["evaluation"]
    assert completed("logs", "eval/nightly", "-c", "sc") == ["scorer"]
    assert completed("inf", "run", "--scheduler", "lo") == ["local"]
    assert completed("inf", "logs", "-c", "") == ["gateway", "router", "engine", "data-proxy"]


def test_kind_without_processes_or_replicas_is_reported(areal: Areal) -> None:
    assert "has no process" in areal("logs", "eval/nightly").err
    assert "no replicas" in areal("scale", "eval/nightly", "--replicas", "2").err


def test_delete_and_wait_work_on_new_kind(areal: Areal) -> None:
    assert areal("delete", "eval/nightly", "--yes").code == 0
    assert areal("wait", "eval/nightly", "--for", "deleted", "--timeout", "5s").code == 0
