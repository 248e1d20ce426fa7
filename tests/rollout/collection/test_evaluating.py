"""``areal eval`` against a data proxy: scores, baselines, exit statuses, refusals."""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from areal.state.home import Home
from tests.cli.conftest import Areal, Result, recorder
from tests.rollout.collection.conftest import Bench, Collecting
from tests.services.processes import engine_calls, script

QUESTIONS = [{"question": f"{n} and {n}?", "answer": f"so #### {2 * n}"} for n in range(4)]


class Evaluating:
    """``areal eval`` of the bench's model; evaluations are in the home."""

    def __init__(self, areal: Areal, collecting: Collecting) -> None:
        self.areal = areal
        self.home = collecting.folder / "home"
        self.data = collecting.data(*QUESTIONS)

    def __call__(self, name: str, *words: str, data: str | None = None) -> Result:
        given = ["--dataset", data or self.data, "--reward", "number", "--name", name]
        return self.areal("eval", *given, "-o", "json", *words)

    def folder(self, name: str) -> Path:
        return self.home / "evaluations" / name


@pytest.fixture
def evaluating(areal: Areal, collecting: Collecting) -> Evaluating:
    return Evaluating(areal, collecting)


def value(document: Any, *path: str) -> Any:
    for name in path:
        document = document[name]
    return document


def test_scores_match_episodes_and_are_kept_by_name(bench: Bench, evaluating: Evaluating) -> None:
    script(bench.engine, text="it is 2")
    ran = evaluating("two", "--n-samples", "2")
    assert ran.code == 0, ran.err
    assert value(ran.json, "scores", "pass@1", "value") == value(ran.json, "scores", "pass@2", "value") == 0.25
    assert value(ran.json, "scores", "reward", "prompts") == 4
    assert (ran.json["done"], ran.json["samples"], ran.json["pass_threshold"]) == (8, 2, 1.0)
    assert json.loads((evaluating.folder("two") / "summary.json").read_text()) == ran.json


def test_baseline_is_compared_per_prompt(bench: Bench, evaluating: Evaluating) -> None:
    script(bench.engine, text="it is 2")
    assert evaluating("before").code == 0
    script(bench.engine, text="it is 4")
    ran = evaluating("after", "--baseline", "before")
    assert ran.code == 0, ran.err
    assert ran.json["comparison"]["changed"] == [
        {"number": 1, "before": 1.0, "after": 0.0},
        {"number": 2, "before": 0.0, "after": 1.0},
    ]
    assert value(ran.json, "comparison", "reward", "value") == 0 and not ran.json["comparison"]["dropped"]
    page = evaluating("after", "--resume", "--baseline", str(evaluating.folder("before")), "-o", "table").out
    assert "1 prompts better, 1 worse, 2 alike" in page and "prompt 1: 1 before, 0 now" in page


def test_evaluation_is_found_by_name_or_numbered_on_conflict(
    bench: Bench, evaluating: Evaluating, tmp_path: Path
) -> None:
    script(bench.engine, text="it is 2")
    for folder in ("one", "two"):
        assert evaluating("mine", "--output", str(tmp_path / folder)).code == 0
    listed = evaluating.home / "evaluations"
    assert {each.name: each.resolve().name for each in listed.iterdir()} == {"mine": "one", "mine-2": "two"}
    resumed = evaluating("mine", "--output", str(tmp_path / "one"), "--resume")
    assert resumed.code == 0 and len(list(listed.iterdir())) == 2
    assert evaluating("next", "--baseline", "mine-2").json["comparison"]["baseline"] == "mine-2"
    assert evaluating("mine").code == 5, "the name is that of an evaluation"


def test_significant_drop_and_low_score_exit_8(bench: Bench, evaluating: Evaluating, collecting: Collecting) -> None:
    data = collecting.data(*({"question": f"{n}?", "answer": "2"} for n in range(20)), name="all.jsonl")
    script(bench.engine, text="it is 2")
    assert evaluating("good", "--fail-under", "1", data=data).code == 0
    script(bench.engine, text="it is 3")
    dropped = evaluating("bad", "--baseline", "good", data=data)
    assert (dropped.code, dropped.json["comparison"]["dropped"]) == (8, True)
    assert "significantly below those of good" in dropped.err
    low = evaluating("low", "--fail-under", "reward=0.5", data=data)
    assert low.code == 8 and "reward is 0, below 0.5" in low.err


def test_fail_under_compares_scores_as_they_are_written(
    bench: Bench, evaluating: Evaluating, collecting: Collecting
) -> None:
    data = collecting.data(*({"question": f"{n}?", "answer": "23"[n > 0]} for n in range(3)), name="third.jsonl")
    script(bench.engine, text="it is 2")
    assert evaluating("third", "--fail-under", str(1 / 3), data=data).code == 0
    below = evaluating("third", "--resume", "--fail-under", "0.33334", data=data)
    assert below.code == 8 and "pass@1 is 0.333333, below 0.33334\n" in below.err
    assert "lists the prompts that changed" not in below.err, "there is no baseline"
    code = "def reward(answer):\n    return 1.0\n"
    reward = f"{collecting.code(code)}:reward"
    agent = f"{collecting.code(FLAKY, name='flaky.py')}:ask"
    words = ("--reward", reward, "--agent", agent, "--n-samples", "2", "--retries", "0", "--concurrency", "1")
    unknown = evaluating("flaky", *words, "--fail-under", "pass@2=0", data=data)
    assert unknown.code == 8 and "pass@2 is unknown: no prompt has enough scored samples" in unknown.err, unknown.err
    named = evaluating("next", "--baseline", "flaky", *words[:2], data=data)
    assert "the baseline has 3 of 6 episodes; 3 are missing" in named.err


def test_evaluation_is_not_its_own_baseline(bench: Bench, evaluating: Evaluating) -> None:
    assert evaluating("mine").code == 0
    refused = evaluating("mine", "--resume", "--baseline", str(evaluating.folder("mine")))
    assert refused.code == 2 and "is this evaluation: it would be compared with itself" in refused.err
    (evaluating.folder("mine") / "trajectories.jsonl").write_text("")
    empty = evaluating("next", "--baseline", "mine")
    assert empty.code == 5 and "the baseline has no scored episode" in empty.err


def test_changed_data_set_is_named_on_resume(bench: Bench, evaluating: Evaluating, collecting: Collecting) -> None:
    data = collecting.data(*QUESTIONS, name="changing.jsonl")
    assert evaluating("mine", data=data).code == 0
    collecting.data(*QUESTIONS[1:], name="changing.jsonl")
    refused = evaluating("mine", "--resume", data=data)
    assert refused.code == 5 and "dataset: its rows have changed since the run began" in refused.err


def test_folder_that_cannot_be_written_is_named(bench: Bench, evaluating: Evaluating, tmp_path: Path) -> None:
    for output in (evaluating.data, f"{evaluating.data}/below", "/proc/none"):
        refused = evaluating("none", "--output", output)
        assert refused.code == 1 and "cannot write " in refused.err and "another --output" in refused.err, refused.err
    assert evaluating("mine").code == 0
    lines = evaluating.folder("mine") / "trajectories.jsonl"
    lines.write_bytes(lines.read_bytes()[:-9])  # as a resumed one that was killed leaves it
    following = evaluating("next", "--baseline", "mine")
    assert following.json["comparison"]["reward"]["prompts"] == 3
    assert "the baseline has 3 of 4 episodes; 1 are missing" in following.err
    journal = evaluating.folder("mine") / "journal.jsonl"
    journal.write_text('{"op": "started"}\n')
    refused = evaluating("mine", "--resume")
    assert refused.code == 3 and "journal.jsonl is unreadable: line 1: KeyError('session_id')" in refused.err


def test_values_that_json_has_no_form_for_are_kept_as_text(
    bench: Bench, evaluating: Evaluating, collecting: Collecting, tmp_path: Path
) -> None:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    rows = [{**row, "at": datetime(2026, 1, 2), "price": Decimal("1.5"), "raw": b"\xff"} for row in QUESTIONS]
    arrow.parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    agent = collecting.code(AGENT.replace('"no reward"', '"half \\ud800"'), name="half.py")
    code = "def reward(completion, at, price, raw):\n    return float(price) * at.day / 3 * len(raw)\n"
    words = ("--reward", f"{collecting.code(code)}:reward", "--agent", f"{agent}:ask")
    ran = evaluating("typed", *words, data=str(tmp_path / "rows.parquet"))
    assert ran.code == 0, ran.err
    assert value(ran.json, "scores", "reward", "value") == 1.0
    (line, *_) = (evaluating.folder("typed") / "trajectories.jsonl").read_text().splitlines()
    example = json.loads(line)["example"]
    assert (example["at"], example["price"], example["raw"]) == ("2026-01-02 00:00:00", "1.5", "b'\\xff'")
    again = evaluating("again", *words, "--baseline", "typed", data=str(tmp_path / "rows.parquet"))
    assert (again.code, again.json["comparison"]["reward"]["prompts"]) == (0, 4), again.err


def test_episode_that_is_in_file_twice_counts_once(bench: Bench, evaluating: Evaluating) -> None:
    script(bench.engine, text="it is 2")
    ran = evaluating("twice")
    lines = evaluating.folder("twice") / "trajectories.jsonl"
    lines.write_bytes(lines.read_bytes() + lines.read_bytes().splitlines(keepends=True)[1])
    resumed = evaluating("twice", "--resume")
    assert (resumed.code, resumed.json["done"], resumed.json["scores"]) == (0, 4, ran.json["scores"]), resumed.err
    assert evaluating("next", "--baseline", "twice").json["comparison"]["reward"]["value"] == 0


def test_mismatched_baseline_is_refused_before_first_prompt(
    bench: Bench, evaluating: Evaluating, collecting: Collecting
) -> None:
    assert evaluating("before").code == 0
    script(bench.engine, reset=True)
    other = collecting.data({"question": "9?", "answer": "9"}, name="other.jsonl")
    refused = evaluating("after", "--baseline", "before", data=other)
    assert refused.code == 5 and "0 of its 4 are among the 1 here" in refused.err
    refused = evaluating("after", "--baseline", "before", "--reward", "exact")
    assert refused.code == 5 and "was rewarded by number" in refused.err
    absent = evaluating("after", "--baseline", "nothing")
    assert absent.code == 4 and "evaluations of this home: before" in absent.err
    assert engine_calls(bench.engine) == [] and not evaluating.folder("after").exists()


def test_evaluation_of_newer_version_is_refused_first(bench: Bench, evaluating: Evaluating) -> None:
    assert evaluating("before").code == 0
    script(bench.engine, reset=True)
    about = evaluating.folder("before") / "run.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "format": 2}))
    for words in (("after", "--baseline", "before"), ("before", "--resume")):
        refused = evaluating(*words)
        assert refused.code == 3 and "a newer areal wrote it (format 2, this one knows 1)" in refused.err, refused.err
    for text in ("{", '{"format": "1", "run_id": "a"}', '{"format": 1}'):
        about.write_text(text)
        refused = evaluating("after", "--baseline", "before")
        assert "run.json is unreadable" in refused.err and "a newer areal" not in refused.err, refused.err
    assert engine_calls(bench.engine) == []


def test_failed_episodes_are_excluded_and_only_they_are_resumed(
    bench: Bench, evaluating: Evaluating, collecting: Collecting
) -> None:
    code = "def reward(answer, **data):\n    return 1.0 if answer != 'so #### 6' else 1 / 0\n"
    reward = f"{collecting.code(code)}:reward"
    ran = evaluating("part", "--reward", reward, "--retries", "0")
    assert (
        ran.code == 9
        and f"1 of 4 episodes failed: 1 reward; the first, {evaluating.data}:4: ZeroDivisionError" in ran.err
    )
    assert value(ran.json, "scores", "pass@1", "prompts") == 3 and ran.json["failures"] == {"reward": 1}
    collecting.code(code.replace("1 / 0", "0.0"))
    script(bench.engine, reset=True)
    ran = evaluating("part", "--reward", reward, "--resume")
    assert (ran.code, value(ran.json, "scores", "pass@1", "value")) == (0, 0.75)
    assert len(engine_calls(bench.engine)) == 1


def test_finished_evaluation_of_saved_weights_is_resumed_without_service(
    bench: Bench, evaluating: Evaluating, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = evaluating("learn-3")
    about = evaluating.folder("learn-3") / "run.json"
    own = {"model": "eval-learn-3", "target": "trainjob/learn@3"}
    about.write_text(json.dumps({**json.loads(about.read_text()), **own}))
    home = Home(evaluating.home)
    recorder(home)("TrainJob", "learn", {})
    (home.jobs / "learn" / "models" / "step_3").mkdir(parents=True)
    monkeypatch.setattr("areal.cli.evaluate.converge", None)
    script(bench.engine, reset=True)
    words = ("learn-3", "trainjob/learn@3", "--context", "local", "--backend", "embedded:d1", "--resume")
    resumed = evaluating(*words)
    assert (resumed.code, resumed.json["scores"]) == (0, ran.json["scores"]), resumed.err
    refused = evaluating(*words, "--temperature", "0")
    assert refused.code == 5 and "temperature: None there, 0.0 now" in refused.err
    assert engine_calls(bench.engine) == []


@pytest.mark.parametrize(
    ("reward", "code", "message"),
    [
        (
            "def reward(completion, solution):\n    return 1.0\n",
            2,
            "data.jsonl:1: the reward reward(completion, solution) cannot be called: missing a required argument: ",
        ),
        (
            "def reward(completions: list[str], **kwargs) -> list[float]:\n    return [1.0]\n",
            2,
            "reward(completions: list[str], **kwargs) -> list[float] cannot be called: completions is one text",
        ),
        (
            "def reward(completion, **data):\n    return 1.0 if completion == data['solution'] else 0.0\n",
            2,
            "data.jsonl:1: the reward reward(completion, **data) cannot be called: it reads 'solution' from its **",
        ),
        ("def reward(ngram: int = 3, least=-1.0):\n    return 1.0\n", 2, "it has a parameter for none of what it gets"),
        ("class reward:\n    pass\n", 2, "a reward is a function, not a class"),
        ("def other(completion):\n    return 1.0\n", 2, "reward"),
        ("import nowhere_at_all\n", 2, "nowhere_at_all"),
    ],
)
def test_unusable_reward_is_refused_before_first_prompt(
    bench: Bench, evaluating: Evaluating, collecting: Collecting, reward: str, code: int, message: str
) -> None:
    refused = evaluating("none", "--reward", f"{collecting.code(reward)}:reward")
    assert refused.code == code and message in refused.err, refused.err
    assert engine_calls(bench.engine) == [] and not evaluating.folder("none").exists()
    served = evaluating("none", "trainjob/gone@3", "--context", "local", "--reward", "nowhere_at_all:reward")
    assert "nowhere_at_all" in served.err and "gone" not in served.err  # nothing is served for it


AGENT = """
import json, urllib.request

def ask(data, base_url, api_key):
    body = json.dumps({"messages": [{"role": "user", "content": data["question"]}]}).encode()
    headers = {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)).read()
    return "no reward"
"""


FLAKY = f"""{AGENT.replace("ask", "answered")}
asked = set()

def ask(data, base_url, api_key):
    if data["question"] in asked:
        raise ValueError("asked before")
    asked.add(data["question"])
    return answered(data, base_url, api_key)
"""


def test_token_id_reward_is_refused_for_agent(bench: Bench, evaluating: Evaluating, collecting: Collecting) -> None:
    code = (
        AGENT + "def reward(prompt, completions, prompt_ids, completion_ids, answer):\n    return len(completion_ids)\n"
    )
    agent, reward = (f"{collecting.code(code)}:{name}" for name in ("ask", "reward"))
    refused = evaluating("none", "--agent", agent, "--reward", reward)
    assert refused.code == 2 and "missing a required argument: 'prompt_ids'" in refused.err
    assert engine_calls(bench.engine) == []
    assert evaluating("ids", "--reward", reward).code == 0


def test_evaluation_without_a_reward_is_refused(bench: Bench, evaluating: Evaluating, collecting: Collecting) -> None:
    ran = evaluating.areal("eval", "--dataset", evaluating.data, "--name", "none")
    assert ran.code == 2 and "no reward is given" in ran.err
    agent = f"{collecting.code(AGENT)}:ask"
    ran = evaluating.areal("eval", "--dataset", evaluating.data, "--name", "none", "--agent", agent)
    assert ran.code == 2 and "4 of 4 episodes have no reward" in ran.err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["trainjob/none@3"], 2, "is another gateway"),
        (["trainjob/none@3", "--context", "local"], 4, "TrainJob/none does not exist"),
        (["job/learn@three"], 2, "neither a model nor trainjob/NAME[@STEP]"),
        (["--fail-under", "pass@0=1"], 2, "is not a number, pass@K=NUMBER or reward=NUMBER"),
        (["--fail-under", "nan"], 2, "is not a number"),
        (["--fail-under", "pass@4=0.5"], 2, "the scores of 1 samples are reward, pass@1"),
        (["--backend", "embedded"], 2, "this model is already served"),
        (["--confidence", "1"], 2, "--confidence"),
        (["--name", "../up"], 2, "--name ../up"),
    ],
)
def test_bad_input_is_named(bench: Bench, evaluating: Evaluating, words: list[str], code: int, message: str) -> None:
    ran = evaluating("bad", *words)
    assert (ran.code, message in ran.err) == (code, True), ran.err
