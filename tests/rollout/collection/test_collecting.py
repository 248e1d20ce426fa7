"""``areal inf collect`` against a data proxy: what it writes, what it counts, what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from areal.trajectories.reading import read_episodes
from tests.cli.conftest import REPOSITORY, Spawner
from tests.rollout.collection.conftest import Bench, Collecting
from tests.services.processes import engine_calls, script, wait_ready

QUESTIONS = [{"question": f"{n} and {n}?", "answer": f"so #### {2 * n}"} for n in range(3)]


def test_episodes_match_engine_output(bench: Bench, collecting: Collecting) -> None:
    script(bench.engine, text="it is 2", version=5)
    result = collecting(collecting.data(*QUESTIONS), "--reward", "number", "--n-samples", "2", "--max-tokens", "40")
    assert result.code == 0, result.err
    lines = sorted(collecting.lines(), key=lambda line: line["episode"])
    assert [line["episode"] for line in lines] == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    assert [line["reward"] for line in lines] == [0, 0, 1, 1, 0, 0]
    assert {line["answer"] for line in lines} == {"it is 2"}
    assert lines[2]["example"] == QUESTIONS[1]
    (row,) = lines[0]["interactions"]
    prompt, answer = row["loss_mask"].count(0), row["loss_mask"].count(1)
    seen = [call["body"] for call in engine_calls(bench.engine)]
    assert row["input_ids"][:prompt] in [each["input_ids"] for each in seen]
    assert {each["sampling"]["max_new_tokens"] for each in seen} == {40}
    assert row["versions"] == [-1] * prompt + [5] * answer
    assert row["rewarded"] and row["finish_reason"] == "stop"
    assert result.json["reward"]["mean"] == pytest.approx(1 / 3)
    assert result.json["groups"] == {"prompts": 3, "all_best": 1, "all_equal": 3, "best_of_n": pytest.approx(1 / 3)}
    assert json.loads((collecting.output / "summary.json").read_text()) == result.json
    assert not (collecting.output / "journal.jsonl").exists()


def test_tools_of_a_row_are_in_its_prompt(bench: Bench, collecting: Collecting, tokenizer: Path) -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "weather"}}])
    assert collecting(collecting.data({"question": "Oslo?", "tools": tools})).code == 0
    (call,) = engine_calls(bench.engine)
    prompt = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode(call["body"]["input_ids"])
    assert 'Tools: [{"type": "function", "function": {"name": "weather"}}]' in prompt


EXTRAS = ("aiohttp", "httptools", "numpy", "orjson", "torch", "uvloop")


def test_installation_without_extras_collects(
    bench: Bench, collecting: Collecting, spawn: Spawner, tmp_path: Path
) -> None:
    script(bench.engine, text="it is 2")
    (tmp_path / "absent").mkdir()
    for name in EXTRAS:
        (tmp_path / "absent" / f"{name}.py").write_text(f"raise ImportError('no {name}')\n")
    words = collecting.arguments(collecting.data(*QUESTIONS), "--reward", "number", "--n-samples", "2")
    lean = spawn(*words, PYTHONPATH=os.pathsep.join([str(tmp_path / "absent"), str(REPOSITORY)])).finish()
    assert lean.code == 0, lean.err
    lines = collecting.lines()
    assert sorted(line["episode"] for line in lines) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    assert sum(line["reward"] for line in lines) == 2
    row = lines[0]["interactions"][0]
    assert len(row["input_ids"]) == len(row["logprobs"]) == len(row["versions"]) > 0
    assert [each for each in bench.sessions() if each["ready"]] == []


def test_output_is_acknowledged_and_removed_from_service(bench: Bench, collecting: Collecting) -> None:
    assert collecting(collecting.data(*QUESTIONS), "--reward", "number").code == 0
    run_id = json.loads((collecting.output / "run.json").read_text())["run_id"]
    assert [each for each in bench.sessions() if run_id in each["task_id"]] == []


def test_parquet_matches_json_and_is_appended(bench: Bench, collecting: Collecting) -> None:
    pytest.importorskip("pyarrow")
    data = collecting.data(*QUESTIONS)
    assert collecting(data, "--reward", "number", "--parquet").code == 0
    more = collecting(data, "--reward", "number", "--parquet", "--n-samples", "2", "--resume")
    assert (more.code, more.json["done_before"], more.json["done"]) == (0, 3, 6)
    assert [each.name for each in sorted(collecting.output.glob("traj*"))] == [
        "trajectories-00000.parquet",
        "trajectories-00001.parquet",
    ]
    episodes = list(read_episodes(collecting.output))
    assert sorted(each.episode for each in episodes) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    row = episodes[0].interactions[0]
    assert len(row.input_ids) == len(row.logprobs) == len(row.versions) > 0
    assert episodes[0].example in QUESTIONS


AGENT = """
import json, urllib.request

class Agent:
    async def run(self, data, *, base_url, api_key):
        messages, ids = [], []
        for turn in ("a", "b"):
            messages.append({"role": "user", "content": data["prompt"] + turn})
            body = json.dumps({"messages": messages}).encode()
            headers = {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}
            request = urllib.request.Request(base_url + "/chat/completions", body, headers)
            with urllib.request.urlopen(request) as answer:
                reply = json.load(answer)
            messages.append(reply["choices"][0]["message"])
            ids.append(reply["id"])
        return {ids[1]: 1.0, ids[0]: 0.5}
"""


def test_agent_from_file_rewards_each_turn(bench: Bench, collecting: Collecting) -> None:
    agent = collecting.code(AGENT)
    data = collecting.data({"prompt": "x"})
    result = collecting(data, "--agent", f"{agent}:Agent", "--discount", "0.5", "--style", "concat")
    assert result.code == 0, result.err
    (line,) = collecting.lines()
    (row,) = line["interactions"]
    assert max(row["turn_ids"]) == 1
    assert line["reward"] == row["original_reward"] == 1.5
    (collecting.output / "trajectories.jsonl").unlink()
    (collecting.output / "run.json").unlink()
    assert collecting(data, "--workflow", f"{agent}:Agent", "--discount", "0.5").code == 0
    rows = collecting.lines()[0]["interactions"]
    assert [row["original_reward"] for row in rows] == [0.5, 1.0]
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    assert rows[1]["parent_id"] == rows[0]["interaction_id"]


REWARDS = """
import os, time
def reward(completion, prompt, answer):
    if prompt == "raises":
        raise ValueError("no such thing")
    if prompt == "nan":
        return float("nan")
    if prompt == "hangs":
        time.sleep(60)
    if prompt == "dies":
        os._exit(3)
    print("rewards may print")
    return 0.75
"""


def test_failing_reward_is_a_failure_and_not_a_number(bench: Bench, collecting: Collecting) -> None:
    reward = collecting.code(REWARDS)
    prompts = ["raises", "fine", "nan", "hangs", "dies", "fine"]
    data = collecting.data(*({"prompt": each, "answer": 0} for each in prompts))
    result = collecting(data, "--reward", f"{reward}:reward", "--reward-timeout", "2", "--retries", "0")
    assert result.code == 9
    assert [line["reward"] for line in collecting.lines()] == [0.75, 0.75]
    assert result.json["failures"] == {"reward": 3, "reward_timeout": 1}
    assert result.json["reward"]["mean"] == 0.75
    assert "4 of 6 episodes failed" in result.err
    reasons = {failure["episode"]: failure["message"] for failure in collecting.failures()}
    assert "no such thing" in reasons["0-0"]
    assert "must be finite" in reasons["2-0"]
    assert "status 3" in reasons["4-0"]


def test_failed_episodes_are_retried_by_later_run(bench: Bench, collecting: Collecting) -> None:
    script(bench.engine, fail=500)
    data = collecting.data(*QUESTIONS)
    result = collecting(data, "--retries", "1")
    assert result.code == 8
    assert result.json["failures"] == {"unreachable": 3}
    assert result.json["retries"] == 3
    script(bench.engine, reset=True)
    assert collecting(data).code == 5, "without --resume the folder is taken"
    mended = collecting(data, "--resume")
    assert (mended.code, mended.json["done"], mended.json["failed"]) == (0, 3, 0)
    assert len({line["episode"] for line in collecting.lines()}) == 3
    assert mended.json["reward"] is None and mended.json["unrewarded"] == 3


WITH_TOKENS = """
def reward(prompt, completions, prompt_ids, completion_ids, answer, **data):
    assert completions == "it is 2" and prompt_ids and data["question"]
    return len(completion_ids) / 100
"""


def test_reward_of_the_training_signature_gets_token_ids(bench: Bench, collecting: Collecting) -> None:
    script(bench.engine, text="it is 2")
    reward = collecting.code(WITH_TOKENS)
    assert collecting(collecting.data(QUESTIONS[0]), "--reward", f"{reward}:reward").code == 0
    (line,) = collecting.lines()
    assert line["reward"] == pytest.approx(line["interactions"][0]["loss_mask"].count(1) / 100)


SLOW = """
import time
def agent(data, base_url, api_key, model):
    time.sleep(30 if data["prompt"] == "slow" else 0)
    if data["prompt"] == "raises":
        raise RuntimeError("the tool is broken")
"""


def test_hanging_raising_or_idle_agent_is_a_failure(bench: Bench, collecting: Collecting) -> None:
    agent = collecting.code(SLOW)
    data = collecting.data(*({"prompt": each} for each in ("slow", "raises", "silent")))
    result = collecting(data, "--agent", f"{agent}:agent", "--timeout", "2", "--retries", "0")
    assert result.code == 8
    assert result.json["failures"] == {"agent": 1, "no_interaction": 1, "timeout": 1}
    messages = [each["message"] for each in collecting.failures()]
    assert any(each.startswith("RuntimeError: the tool is broken (") and "user.py:" in each for each in messages)


def test_folder_with_more_episodes_than_requested_is_complete(bench: Bench, collecting: Collecting) -> None:
    data = collecting.data(*QUESTIONS)
    assert collecting(data, "--n-samples", "2").code == 0
    result = collecting(data, "--limit", "2", "--resume")
    assert (result.code, result.json["planned"], result.json["done"], result.json["missing"]) == (0, 2, 2, 0)
    assert len(collecting.lines()) == 6


def test_refused_request_is_not_retried(bench: Bench, collecting: Collecting) -> None:
    result = collecting(collecting.data({"prompt": "word " * 5000}), "--retries", "5")
    assert (result.code, result.json["failures"], result.json["retries"]) == (8, {"refused": 1}, 0)


def test_example_that_ends_with_its_answer_is_refused(bench: Bench, collecting: Collecting) -> None:
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    result = collecting(collecting.data({"messages": answered}, *QUESTIONS[:1]))
    assert (result.code, result.json["failures"], result.json["done"]) == (9, {"refused": 1}, 1)
    assert "the last message is the assistant's" in result.err


def test_resume_with_other_settings_names_difference(bench: Bench, collecting: Collecting) -> None:
    data = collecting.data(*QUESTIONS)
    assert collecting(data, "--temperature", "0.5").code == 0
    result = collecting(data, "--temperature", "1", "--resume")
    assert result.code == 5
    assert "temperature: 0.5 there, 1.0 now" in result.err
    other = collecting(collecting.data({"prompt": "x"}, name="other.jsonl"), "--temperature", "0.5", "--resume")
    assert other.code == 5 and "dataset:" in other.err


@pytest.mark.parametrize(
    ("text", "words", "code", "message"),
    [
        ("{not json}\n", (), 3, "data.jsonl:1: no JSON"),
        ('{"id": 1}\n', (), 3, "none of its fields (id)"),
        ('{"question": "", "answer": "2"}\n', (), 3, "the example has no prompt: its question is empty"),
        ("[1]", (), 3, "a row is a map of columns, not int"),
        ("", (), 3, "there are no rows"),
        ('{"prompt": "x", "tools": "["}\n', (), 3, "data.jsonl:1: tools must be a list, or the JSON text of one"),
        ('{"prompt": 7}\n', (), 3, "neither text nor a list of messages"),
        ('{"prompt": "x"}\n', ("--agent", "nowhere:agent"), 2, "there is no module nowhere"),
        ('{"prompt": "x"}\n', ("--agent", "json"), 2, "write module:attr"),
        ('{"prompt": "x"}\n', ("--agent", "json:lods"), 2, 'did you mean "loads"'),
        ('{"prompt": "x"}\n', ("--reward", "json:lods"), 2, 'did you mean "loads"'),
        ('{"prompt": "x"}\n', ("--agent", "json:loads", "--temperature", "1"), 2, "--temperature"),
        ('{"prompt": "x"}\n', ("--model", "other"), 4, "does not start sessions of other: 404"),
    ],
    ids=lambda value: value.strip() if isinstance(value, str) and value[:1] in "{[" else None,
)
def test_bad_input_is_named(
    bench: Bench, collecting: Collecting, tmp_path: Path, text: str, words: tuple[str, ...], code: int, message: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text, encoding="utf-8")
    result = collecting(str(path), *words)
    assert result.code == code, result.err
    assert message in result.err


def test_missing_data_set_is_not_found(
    bench: Bench, collecting: Collecting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert collecting("./nothing.jsonl").code == 4
    result = collecting("someone/some-set")
    assert result.code == 4 and "HF_HUB_OFFLINE" in result.err


def test_lost_service_ends_run_early_with_resume_hint(collecting: Collecting) -> None:
    data = collecting.data(*({"prompt": str(each)} for each in range(200)))
    result = collecting(data, "--model", "x", "--gateway", "http://127.0.0.1:9", "--concurrency", "2", "--retries", "0")
    assert result.code == 1
    assert "has not answered" in result.err and "--resume" in result.err
    assert len(collecting.failures()) < 20


# A collection of an external model: messages instead of tokens, through the same files and views.


def test_external_models_messages_are_collected_and_shown(bench: Bench, collecting: Collecting, tmp_path: Path) -> None:
    argv = ("--model", "friend", "--engine", "external", "--engine-url", bench.proxy.url, "--provider-model", "tiny")
    state = ("--state-dir", str(tmp_path / "state"))
    friend = bench.processes.service("data_proxy", *argv, *state, env={"AREAL_PROVIDER_API_KEY": bench.key})
    wait_ready(friend)
    data = collecting.data({"prompt": "hi", "answer": "Hello there, friend!"})
    words = ("--reward", "exact", "--gateway", friend.url)
    result = collecting(data, *words)
    assert result.code == 0, result.err
    (line,) = collecting.lines()
    (row,) = line["interactions"]
    assert (row["messages"], row["response"]["content"]) == (
        [{"role": "user", "content": "hi"}],
        "Hello there, friend!",
    )
    assert (line["reward"], result.json["generated_tokens"]) == (1.0, 0)
    shown = collecting.areal("inf", "trajectories", "show", str(collecting.output))
    assert "user: hi\n  assistant: Hello there, friend!" in shown.out
    assert shown.err == "", "no tokenizer is missed where there are no tokens"
    pytest.importorskip("pyarrow")
    (collecting.output / "trajectories.jsonl").rename(tmp_path / "t.jsonl")
    (collecting.output / "run.json").unlink()
    assert collecting(data, *words, "--parquet").code == 0
    assert "assistant: Hello there" in collecting.areal("inf", "trajectories", "show", str(collecting.output)).out


@pytest.mark.parametrize(("column", "images"), [("images", ["red.png"]), ("image", "red.png")])
def test_image_rows_are_refused_for_text_requests(
    column: str, images: str | list[str], bench: Bench, collecting: Collecting
) -> None:
    data = collecting.data({"question": "what is it?", column: images, "answer": "red"})
    refused = collecting(data, "--reward", "exact")
    assert refused.code == 2 and f"has a column {column}, and its prompts are asked in text" in refused.err
    assert not collecting.output.exists() and not engine_calls(bench.engine)
