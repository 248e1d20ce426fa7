"""The page of evaluations, over what ``areal eval`` wrote: scores, the prompts that changed, their samples."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.cli.main import run
from areal.errors import NotFound
from areal.state.home import Home
from tests.cli.conftest import recorder
from tests.rollout.collection.conftest import Bench, module_processes, shared, tokenizer  # noqa: F401 - fixtures
from tests.services.processes import script
from tests.ui.test_training import ask

QUESTIONS = [{"question": f"{n} and {n}?", "answer": f"so #### {2 * n}"} for n in range(4)]
WAYS = {"before": "it is 2", "after": "it is 4", "other": "it is 6"}


@pytest.fixture(scope="module")
def evaluated(shared: Bench, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:  # noqa: F811
    """A home with three evaluations of two samples a prompt; ``after`` has ``before`` as its baseline. The model is
    recorded: its tokenizer decodes their tokens."""
    folder = tmp_path_factory.mktemp("evaluated")
    home = Home(folder / "home")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    given = ["eval", "--dataset", str(data), "--reward", "number", "--n-samples", "2", "-o", "json"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("HOME", folder), ("AREAL_HOME", home.root), ("AREAL_GATEWAY", shared.proxy.url)):
            patch.setenv(name, str(value))
        patch.setenv("AREAL_API_KEY", shared.key)
        for name, text in WAYS.items():
            script(shared.engine, text=text)
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                code = run([*given, "--name", name, *(["--baseline", "before"] if name == "after" else [])])
            assert code == 0, out.getvalue()
    target = json.loads(out.getvalue())["target"]
    recorder(home)("Model", target, {"service": "default", "backend": "embedded:d1", "path": str(tokenizer)})
    yield home


def test_list_has_scores_with_the_change_to_the_baseline(evaluated: Home) -> None:
    rows = {each["name"]: each for each in ask(evaluated, "evaluations")["evaluations"]}
    assert list(rows) == ["other", "after", "before"]
    after = rows["after"]
    assert (after["done"], after["planned"], after["isFinished"], after["problem"]) == (8, 8, True, "")
    assert {each["name"]: each["value"] for each in after["scores"]} == {"pass@1": 0.25, "pass@2": 0.25, "reward": 0.25}
    assert (after["baseline"], after["change"], after["dropped"]) == ("before", 0.0, False)
    assert rows["other"]["baseline"] is None and rows["other"]["change"] is None


def test_changed_prompts_come_first_for_any_baseline(evaluated: Home) -> None:
    found = ask(evaluated, "evaluations", name="after")
    assert (found["against"], found["show"], found["choices"]) == ("before", "changed", ["other", "before"])
    assert [(each["prompt"], each["change"]) for each in found["prompts"]] == [(1, -1.0), (2, 1.0)]
    first = found["prompts"][0]
    assert (first["before"]["passes"], first["now"]["passes"], first["question"]) == (2, 0, "1 and 1?")
    assert first["before"]["answers"] == ["it is 2<|im_end|>"] and first["now"]["answers"] == ["it is 4<|im_end|>"]
    assert (found["better"], found["worse"], found["both"]) == (1, 1, 4) and not found["isDropped"]
    assert [each["name"] for each in found["difference"]] == ["pass@1", "reward"]
    worse = ask(evaluated, "evaluations", name="after", show="worse", against="other")
    assert [each["prompt"] for each in worse["prompts"]] == [3] and worse["against"] == "other"
    alone = ask(evaluated, "evaluations", name="after", against="none")
    assert len(alone["prompts"]) == 4 and alone["difference"] == [] and alone["prompts"][0]["before"] is None


def test_prompt_shows_samples_of_both_with_tokens(evaluated: Home) -> None:
    found = ask(evaluated, "evaluations", name="after", prompt="1")
    assert [each["name"] for each in found["sides"]] == ["after", "before"]
    assert (found["previous"], found["next"], found["decoded"]) == (None, 2, True)
    for side, answer in zip(found["sides"], ("it is 4", "it is 2"), strict=True):
        assert len(side["episodes"]) == 2 and side["leftOut"] == 0
        turn = side["episodes"][0]["shown"]["turns"][0]
        assert answer in "".join(turn["texts"]) and len(turn["lp"]) == turn["mask"].count("1")
    with pytest.raises(NotFound, match="no sample of prompt 9"):
        ask(evaluated, "evaluations", name="after", prompt="9")


def test_other_evaluations_are_of_home_and_never_a_path(evaluated: Home) -> None:
    found = ask(evaluated, "evaluations", name="after", against=str(evaluated.root / "evaluations" / "other"))
    assert found["against"] is None and "this home has no evaluation" in found["againstProblem"]
    assert found["show"] == "all" and len(found["prompts"]) == 4
    with pytest.raises(NotFound, match="there is no evaluation"):
        ask(evaluated, "evaluations", name="nothing")


def test_unfinished_and_damaged_evaluations_are_named(evaluated: Home, tmp_path: Path) -> None:
    home = Home(tmp_path / "copy")
    shutil.copytree(evaluated.root / "evaluations", home.root / "evaluations")
    (home.root / "evaluations" / "after" / "summary.json").unlink()
    (home.root / "evaluations" / "other" / "summary.json").write_text("{")
    rows = {each["name"]: each for each in ask(home, "evaluations")["evaluations"]}
    assert not rows["after"]["isFinished"] and rows["after"]["problem"] == ""
    assert "summary.json cannot be read" in rows["other"]["problem"]
    going_on = ask(home, "evaluations", name="after")
    assert len(going_on["prompts"]) == 4 and going_on["scores"] == [] and going_on["choices"] == ["other", "before"]


def test_validation_of_a_job_is_a_baseline_with_samples(evaluated: Home, tmp_path: Path) -> None:
    home = Home(tmp_path / "copy")
    shutil.copytree(evaluated.root / "evaluations", home.root / "evaluations")
    recorder(home)("TrainJob", "learn")
    lines = (home.root / "evaluations" / "before" / "trajectories.jsonl").read_text()
    (home.jobs / "learn" / "trajectories").mkdir(parents=True)
    (home.jobs / "learn" / "trajectories" / "trajectories-eval-000003.jsonl").write_text(lines)
    summary = home.root / "evaluations" / "after" / "summary.json"
    document = json.loads(summary.read_text())
    document["comparison"] |= {"baseline": "trainjob/learn@3", "baseline_path": ""}
    document["target"] = "trainjob/learn@4"
    summary.write_text(json.dumps(document))
    assert ask(home, "job", name="learn")["evaluations"] == 1
    found = ask(home, "evaluations", name="after", prompt="1")
    assert found["against"] == "trainjob/learn@3" and [len(each["episodes"]) for each in found["sides"]] == [2, 2]
