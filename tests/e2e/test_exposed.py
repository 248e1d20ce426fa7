"""A gateway that other machines reach: it becomes Ready, everything of ours still talks to it, and it asks for a key
that cannot be guessed."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from tests.e2e.conftest import MODEL, Box

KEY = "0123456789abcdef"


def exposed(box: Box, host: str, auth: str = "") -> str:
    return box.write(
        "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: default}\nspec:\n"
        f"  gateway: {{host: '{host}', port: {box.port}}}\n{auth}"
        "---\napiVersion: areal.dev/v1alpha1\nkind: Model\nmetadata: {name: reverse}\nspec:\n"
        f"  backend: embedded:d1\n  path: {MODEL}\n"
    )


def status_of(url: str, key: str | None = None) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.extended
@pytest.mark.parametrize("host", ["0.0.0.0", pytest.param("::", marks=pytest.mark.slow)])
def test_public_gateway_is_reached_by_every_verb(box: Box, host: str) -> None:
    file = exposed(box, host)
    box.ok("apply", "-f", file, "--timeout", "120s")
    found = json.loads(box.ok("get", "inferenceservice/default", "-o", "json").out)["status"]
    url = found["address"]
    assert found["phase"] == "Ready" and "0.0.0.0" not in url and "[::]" not in url
    assert [status_of(url + path) for path in ("/health", "/ready", "/metrics")] == [200, 200, 401]
    assert status_of(url + "/metrics", box.key) == 200
    assert box.areal("diff", "-f", file).code == 0
    assert box.areal("diff", "--drift").code == 0
    assert json.loads(box.ok("inf", "status", "-o", "json").out)["healthy"] is True
    box.ok("describe", "inf/default")
    box.ok("wait", "inf/default", "model/reverse", "--for", "ready", "--timeout", "30s")
    assert box.ok("inf", "chat", "-m", "12", "--temperature", "0").out.strip()
    box.ok("apply", "-f", file)


@pytest.mark.extended
@pytest.mark.parametrize("source", ["file", "env"])
def test_short_key_on_public_bind_is_refused_before_start(box: Box, source: str) -> None:
    key = box.folder / "key"
    key.write_text(KEY[:15] + "\n")
    key.chmod(0o600)
    value = {"file": str(key), "env": "AREAL_TEST_KEY"}[source]
    file = exposed(box, "0.0.0.0", f"  auth: {{adminKeyFrom: {{{source}: {value}}}}}\n")
    for verb in ("diff", "apply"):
        refused = box.areal(verb, "-f", file, env={"AREAL_TEST_KEY": KEY[:15]})
        assert refused.code == 3 and "15 characters" in refused.err, refused.text
        assert KEY[:15] not in refused.text
    assert not (box.home / "runs").exists()
    words = ["inf", "run", "-d", "--host", "0.0.0.0", "--port", str(box.port), "--admin-api-key-file", str(key)]
    assert box.areal(*words).code == 3
    key.write_text(KEY)
    assert box.areal("diff", "-f", file, env={"AREAL_TEST_KEY": KEY}).code == 1
