"""The documentation's pictures, of the quickstart on its own processes.

``AREAL_UI_PICTURES=$PWD/docs/images pytest -m "browser and slow" tests/ui`` writes
them where the documentation has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, Box, make_box, tear_down
from tests.ui.conftest import Page, page_of
from tests.ui.test_browser import Tab, chromium  # noqa: F401 - fixture

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(900)]
PICTURES = os.environ.get("AREAL_UI_PICTURES")  # tests clear the variables of this project
PROMPT, ANSWER = "1234", "4321"
TESTED = (
    *("--dataset", "examples/reverse_digits/test.jsonl", "--reward", "examples.reverse_digits.reward:reversed_digits"),
    *("--n-samples", "4", "--max-tokens", "8"),
)


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Box]:
    """The quickstart's service while it is alive, with the job that has taught its model."""
    made = make_box(tmp_path)
    made = replace(made, folder=ROOT, home=tmp_path / ".areal", env={**made.env, "HOME": str(tmp_path)})
    try:
        port = f"inferenceservice/default:spec.gateway.port={made.port}"
        made.ok("apply", "-f", "manifests/quickstart.yaml", "--set", port)
        waited = made.areal("wait", "trainjob/learn", "--for", "completed", timeout=700)
        assert waited.code == 0, waited.text
        yield made
    finally:
        tear_down(made)


@pytest.fixture
def page(trained: Box) -> Iterator[Page]:
    with page_of(trained) as it:
        yield it


def test_pictures_show_quickstart_from_objects_to_token(
    chromium: Any,  # noqa: F811
    page: Page,
    trained: Box,
    tmp_path: Path,
) -> None:
    assert trained.chat(PROMPT) == ANSWER
    folder = Path(PICTURES or tmp_path).absolute()
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    context.set_default_timeout(30_000)
    it = Tab(context.new_page(), page)

    def picture(name: str, until: str) -> None:
        it.page.wait_for_selector(until)
        it.page.wait_for_timeout(500)  # curves are drawn
        it.page.screenshot(path=str(folder / f"ui-{name}.png"))

    it.open()
    picture("objects", "main table >> text=reverse")
    it.open("/job/learn?smooth=some")
    picture("job", ".chart canvas")
    it.press("Enter")  # the last step
    picture("step", "main table")
    group = next(each for each in page.read("step", name="learn", step="40")["groups"] if each["spread"])
    it.open(f"/job/learn/step/40/group/{group['group']}")
    picture("group", "article .t")

    other = ("total_train_steps=80", "actor.optimizer.lr=1e-4", "trial_name=slower")
    trained.ok("train", "start", "--config", "examples/reverse_digits/grpo.yaml", "--name", "slower", *other)
    trained.ok("eval", "trainjob/learn@350", "--name", "learn-350", "--baseline", "trainjob/learn@0", *TESTED)
    it.open("/evaluations/learn-350")
    picture("evaluation", "table >> text=pass@1")
    prompts = page.read("evaluations", name="learn-350")["prompts"]
    several = next(each for each in prompts if 1 < each["now"]["passes"] < 4 or each is prompts[-1])
    it.open(f"/evaluations/learn-350/prompt/{several['prompt']}")
    picture("evaluation-prompt", ".side section:nth-child(2) .t")
    waited = trained.areal("wait", "trainjob/slower", "--for", "completed", timeout=400)
    assert waited.code == 0, waited.text
    it.open("/compare?jobs=learn,slower&smooth=some")
    picture("compare", ".chart canvas")
    it.open("/weights")
    picture("weights", ".lane")
    it.open("/logs/trainjob/learn")
    picture("logs", ".log .line")
    it.open("/chat?temperature=1&tokens=8")
    it.press("i")
    it.page.keyboard.type(PROMPT)
    it.press("Enter")
    picture("chat", ".answers .answer")
    it.open("/top")
    it.page.wait_for_timeout(8_000)  # a history to draw
    picture("top", "main table svg")
    context.close()
