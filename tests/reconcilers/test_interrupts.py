"""The exit status of a command that is interrupted, which tells its caller to run it again."""

from __future__ import annotations

import threading
from pathlib import Path

from areal.interrupt import STATUS
from areal.reconcilers.apply import apply
from areal.reconcilers.context import ApplyRequest, Context
from areal.reconcilers.operations import delete
from areal.resources.kinds import Ref
from areal.resources.render import RenderRequest
from areal.state.home import Home
from areal.state.objects import ObjectStore

SERVICE = {
    "apiVersion": "areal.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "default"},
    "spec": {"gateway": {"port": 1}},
}


def test_interrupted_apply_exits_130_and_starts_nothing(tmp_path: Path) -> None:
    interrupted = threading.Event()
    interrupted.set()
    context = Context(Home(tmp_path), "someone", "apply", interrupted=interrupted)

    outcome = apply(context, ApplyRequest(RenderRequest(manifests=(SERVICE,))), lambda _: True)

    assert outcome.exit_code == STATUS
    assert [item.message for item in outcome.objects] == ["not converged: interrupted"]
    assert list(ObjectStore(context.home).list()) == []


def test_interrupted_delete_reports_that_object_remains(tmp_path: Path) -> None:
    context = Context(Home(tmp_path), "someone", "apply")
    suspended = {**SERVICE, "spec": {"suspend": True}}
    assert apply(context, ApplyRequest(RenderRequest(manifests=(suspended,))), lambda _: True).exit_code == 0
    context.interrupted.set()

    outcome = delete(context, [Ref("InferenceService", "default")])

    assert [(item.action, item.message) for item in outcome.objects] == [("failed", "not deleted: interrupted")]
    assert len(ObjectStore(context.home).list()) == 1
