"""The parts of a collection by themselves: numbers, names of code, rewards in processes, files that were cut."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.cli.inf.collect import CollectionReport, summary_page
from areal.cli.operate import ProgressPrinter
from areal.client.errors import CallerError, NotReady, ServiceError, UnknownName, Unreachable, error_of_answer
from areal.client.loop_thread import LoopThread
from areal.dataset.examples import Example
from areal.errors import ArealError, Conflict, UsageFault
from areal.loading import call_with, load_callable
from areal.reward.answers import exact, number
from areal.reward.frames import RewardError, RewardRaised, RewardTimeout
from areal.rollout.collection import AgentResult, RewardScorer, named_agent
from areal.rollout.collection_output import CollectionProgress, EpisodeOutcome, groups, open_folder, spread, summary
from areal.rollout.failures import EpisodeFailed, FailureKind, cause_of, failure_of
from areal.trajectories.record import Episode
from tests.trajectories.samples import branched

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1)


@given(numbers)
def test_spread_matches_values(values: list[float]) -> None:
    found = spread(values)
    assert found is not None
    assert found["mean"] == pytest.approx(statistics.fmean(values), abs=1e-5)
    assert found["std"] == pytest.approx(statistics.pstdev(values), abs=1e-3)
    quantiles = [found[name] for name in ("min", "p50", "p90", "p99", "max")]
    assert quantiles == sorted(quantiles) and set(quantiles) <= set(values)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), max_size=20))
def test_groups_with_equal_rewards_are_counted(given_rewards: list[tuple[int, float]]) -> None:
    found = groups([EpisodeOutcome(prompt, reward, 1, 1, 1, False, 1.0) for prompt, reward in given_rewards])
    by_prompt = [[r for p, r in given_rewards if p == prompt] for prompt in range(4)]
    several = [rewards for rewards in by_prompt if len(rewards) > 1]
    if not several:
        assert found is None
        return
    assert found is not None
    assert found["prompts"] == len(several)
    assert found["all_equal"] == sum(len(set(rewards)) == 1 for rewards in several)
    assert found["all_best"] <= found["all_equal"]


def progress() -> CollectionProgress:
    made = CollectionProgress(10, [EpisodeOutcome(n, float(n % 2), 2, 30, 8, n == 3, 0.5) for n in range(4)], before=2)
    made.failed.update({"reward": 1})
    made.running = 3
    return made


def test_summary_counts_rates_of_this_run_only() -> None:
    found = summary(progress(), 4.0)
    assert (found["done"], found["done_before"], found["missing"], found["truncated"]) == (4, 2, 6, 1)
    assert (found["tokens_per_second"], found["generated_tokens"]) == (4.0, 32)
    page = summary_page({"output": "out", "model": "m", **found})
    assert "4 of 10 episodes of m in out (2 of them by earlier runs)" in page
    assert "failed     1: reward 1" in page
    assert summary(CollectionProgress(0), 0.0)["reward"] is None


def test_progress_without_terminal_prints_every_tenth() -> None:
    stream = io.StringIO()
    with ProgressPrinter(stream=stream) as printer:
        report = CollectionReport(printer)
        report(progress())
        report(progress())
        report(replace(progress(), outcomes=[*progress().outcomes, *progress().outcomes]))
    assert stream.getvalue().splitlines() == [
        "episodes 4/10 (ETA 0s)  reward 0.5  3 running  1 failed",
        "episodes 8/10 (ETA 0s)  reward 0.5  3 running  1 failed",
    ]


# -- user code


def test_call_with_passes_only_accepted_arguments() -> None:
    given_all = {"a": 1, "b": 2, "data": "unused"}
    assert call_with(lambda data, b: (data, b), "x", given=given_all) == ("x", 2)
    assert call_with(lambda data, **rest: sorted(rest), "x", given=given_all) == ["a", "b"]
    assert call_with(lambda *, a=0, z=5: (a, z), given=given_all) == (1, 5)
    assert call_with(len, "xyz", given=given_all) == 3
    with pytest.raises(TypeError):
        call_with(lambda a, missing: None, given=given_all)


def test_named_code_is_loaded_from_modules_and_files(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import neighbour\nclass A:\n    def run(self): return neighbour.N\nX = 3\n")
    (tmp_path / "neighbour.py").write_text("N = 7\n")
    (tmp_path / "broken.py").write_text("1/0\n")
    (tmp_path / "syntax.py").write_text("\ndef f(:\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    assert load_callable("json:loads", "-f") is json.loads
    assert load_callable(f"{tmp_path}/mine.py:A", "-f")().run() == 7
    for text, error in [
        ("json", UsageFault),
        (f"{tmp_path}/mine.py:X", UsageFault),
        (f"{tmp_path}/no.py:f", UsageFault),
        ("json:nothing", UsageFault),
    ]:
        with pytest.raises(error):
            load_callable(text, "-f")
    with pytest.raises(UsageFault, match=r"broken.py:1: ZeroDivisionError") as caught:
        load_callable(f"{tmp_path}/broken.py:f", "-f")
    assert caught.value.detail is None, "a traceback is shown with --debug"
    with pytest.raises(UsageFault, match=r"syntax.py:2: SyntaxError: invalid syntax$"):
        load_callable(f"{tmp_path}/syntax.py:f", "-f")
    with pytest.raises(UsageFault, match=r"ends the process when it is imported: SystemExit\(0\) \(.*script.py:2"):
        load_callable(f"{tmp_path}/script.py:f", "-f")


AGENTS = """
class Plain:
    def run(self, data, **extra): ...
class Fixed:
    @staticmethod
    def run(data, base_url, api_key): ...
class Called:
    def __call__(self, data, model): ...
class Configured:
    def __init__(self, depth): ...
    def run(self, data): ...
async def asked(data, *, api_key): ...
def other(data, base_url, token): ...
def nothing(): ...
"""


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("Plain", ""),
        ("Fixed", ""),
        ("Called", ""),
        ("asked", ""),
        ("Configured", r"Configured\(depth\) cannot be called: missing a required argument: 'depth'"),
        ("other", r"other\(data, base_url, token\) cannot be called: missing a required argument: 'token'"),
        ("nothing", r"nothing\(\) cannot be called: too many positional arguments"),
    ],
)
def test_agent_with_wrong_signature_is_refused_before_session(tmp_path: Path, name: str, fault: str) -> None:
    (tmp_path / "wrong_agents.py").write_text(AGENTS)
    if not fault:
        named_agent(f"{tmp_path}/wrong_agents.py:{name}")
        return
    with pytest.raises(UsageFault, match=fault) as refused:
        named_agent(f"{tmp_path}/wrong_agents.py:{name}")
    assert "it gets the row, and those of base_url, api_key, model" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (503, {"error": {"message": "busy"}}, FailureKind.UNREACHABLE),
        (429, {}, FailureKind.UNREACHABLE),
        (400, {"error": {"message": "no"}}, FailureKind.REFUSED),
        (401, {"error": {"message": "unknown key"}}, FailureKind.LOST),
        (409, {"error": {"message": "over", "code": "session_ended"}}, FailureKind.LOST),
        (404, "<html>", FailureKind.REFUSED),
    ],
)
def test_answers_are_classified_by_responsible_party(status: int, body: Any, kind: FailureKind) -> None:
    assert failure_of(error_of_answer(status, body, {}, "POST /"), 1.0).kind is kind


@pytest.mark.parametrize(
    ("reward", "completion", "answer", "value"),
    [
        (exact, " 42\n", 42, 1.0),
        (exact, "42.", 42, 0.0),
        (number, "first 7, then 1,234.50", "x #### 1234.5", 1.0),
        (number, "none", "3", 0.0),
        (number, "-3", "3", 0.0),
    ],
)
def test_built_in_rewards(reward: Any, completion: str, answer: object, value: float) -> None:
    assert reward(completion, answer) == value


# -- rewards in processes

EXAMPLE = Example(0, {"unused": 1}, ())
MISBEHAVING = """
import os, sys, time
def reward(completion):
    print("to stdout"); sys.stdout.flush()
    return {"hang": lambda: time.sleep(60), "die": lambda: os.kill(os.getpid(), 9), "raise": lambda: 1 / 0,
            "nan": lambda: float("nan"), "text": lambda: "high"}.get(completion, lambda: 0.5)()
"""


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("rewards")
    yield thread
    thread.close()


def test_reward_pool_survives_misbehaving_rewards(tmp_path: Path, thread: LoopThread) -> None:
    (tmp_path / "misbehaving.py").write_text(MISBEHAVING)
    kinds = {}
    with RewardScorer(f"{tmp_path}/misbehaving.py:reward", 1, 0.5, thread) as pool:
        for completion in ("hang", "die", "raise", "nan", "text"):
            with pytest.raises(RewardError) as caught:
                thread.run(pool.score(EXAMPLE, AgentResult(completion)))
            kinds[completion] = failure_of(caught.value, 1.0).kind
            assert thread.run(pool.score(EXAMPLE, AgentResult("fine"))) == 0.5
        pids = [worker._process.pid for worker in pool._pool._all]
    assert kinds == {"hang": FailureKind.REWARD_TIMEOUT} | dict.fromkeys(
        ("die", "raise", "nan", "text"), FailureKind.REWARD
    )
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def test_unloadable_reward_is_reported_before_start(thread: LoopThread) -> None:
    with pytest.raises(ArealError, match="there is no module nowhere"), RewardScorer("nowhere:f", 2, 1.0, thread):
        pass


def test_unknown_built_in_reward_lists_known_ones(thread: LoopThread) -> None:
    with pytest.raises(UsageFault, match='did you mean "exact"') as refused:
        RewardScorer("exat", 1, 1.0, thread)
    assert refused.value.hint is not None and refused.value.hint.startswith("exact, number, or module:function")


ORPHANS = """
import sys, threading
from areal.client.loop_thread import LoopThread
from areal.dataset.examples import Example
from areal.rollout.collection import AgentResult, RewardScorer
thread = LoopThread("rewards")
pool = RewardScorer(sys.argv[1], 1, 60.0, thread).__enter__()
scoring = thread.start(pool.score(Example(0, {}, ()), AgentResult("x")))
threading.Event().wait()
"""


def test_endless_reward_ends_with_collector(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("def f():\n    print('scoring', flush=True)\n    while True: pass\n")
    argv = [sys.executable, "-c", ORPHANS, f"{tmp_path}/endless.py:f"]
    collector = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    assert collector.stderr is not None
    assert collector.stderr.readline() == "scoring\n"
    collector.kill()
    collector.wait()
    assert collector.stderr.read() == "", "it comes to its end with the last that writes to it"


class APIConnectionError(Exception):
    """As the SDKs of the two APIs raise it."""


@pytest.mark.parametrize(
    ("module", "status", "kind"),
    [
        ("openai", None, FailureKind.UNREACHABLE),
        ("openai._exceptions", 503, FailureKind.UNREACHABLE),
        ("anthropic", 401, FailureKind.LOST),
        ("anthropic", 400, FailureKind.REFUSED),
        ("requests", 503, FailureKind.AGENT),
    ],
)
def test_agent_exception_is_attributed_like_its_client(module: str, status: int | None, kind: FailureKind) -> None:
    error = type("APIConnectionError", (APIConnectionError,), {"__module__": module})("x")
    if status is not None:
        error.status_code = status
    wrapped = RuntimeError("the model was not reached")
    wrapped.__cause__ = error
    for each in (error, wrapped, ExceptionGroup("of a task group", [error])):
        assert failure_of(each, 1.0).kind is kind


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RewardTimeout("late"), (FailureKind.REWARD_TIMEOUT, "reward")),
        (RewardRaised("no"), (FailureKind.REWARD, "reward")),
        (Unreachable("POST /: refused"), (FailureKind.UNREACHABLE, "infrastructure")),
        (CallerError("not sent: no model"), (FailureKind.REFUSED, "caller")),
        (UnknownName("gone", status=404, code="session_not_found"), (FailureKind.LOST, "caller")),
        (UnknownName("restarts", status=404, code="model_not_found"), (FailureKind.REFUSED, "service")),
        (ServiceError("broken", status=500), (FailureKind.UNREACHABLE, "service")),
        (NotReady("no reward yet", status=425), (FailureKind.UNREACHABLE, "caller")),
        (ConnectionResetError("of the agent's own call"), (FailureKind.AGENT, "infrastructure")),
        (TimeoutError(), (FailureKind.TIMEOUT, "workflow")),
        (KeyError("x"), (FailureKind.AGENT, "workflow")),
        (EpisodeFailed(FailureKind.NO_INTERACTION, "no call"), (FailureKind.NO_INTERACTION, "workflow")),
    ],
)
def test_failure_has_one_kind_and_one_party_to_blame(error: Exception, cause: tuple[FailureKind, str]) -> None:
    assert cause_of(error) == cause


# -- the folder

ASKED = {"dataset": "d", "model": "m"}


def test_folder_keeps_whole_episodes_after_any_truncation(tmp_path: Path) -> None:
    episodes = [Episode(f"{n}-0", branched().interactions, n, 0) for n in range(3)]
    with open_folder(tmp_path, ASKED, parquet=False, resume=False) as folder:
        for episode in episodes:
            folder.write(episode)
        folder.started("3-0", "s-3")
    lines, journal = tmp_path / "trajectories.jsonl", tmp_path / "journal.jsonl"
    whole, noted = lines.read_bytes(), journal.read_bytes()
    ends = [at for at, byte in enumerate(whole, 1) if byte == 10]
    for at in random.Random(7).sample(range(len(whole)), 12) + ends:
        lines.write_bytes(whole[:at])
        journal.write_bytes(noted + b'{"op": "star')
        with open_folder(tmp_path, ASKED, parquet=False, resume=True) as again:
            left = [each.episode for each in again.episodes()]
            assert left == [f"{n}-0" for n in range(sum(end <= at for end in ends))]
            assert again.previous_run.sessions == {"3-0": "s-3"}


def test_full_disk_leaves_whole_lines_and_is_reported(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_folder(tmp_path, ASKED, parquet=False, resume=False) as folder:
        folder.write(branched())
        appends = (
            ("trajectories", lambda: folder.write(branched("1-0"))),
            ("journal", lambda: folder.started("1-0", "s")),
        )
        for name, append in appends:
            path = tmp_path / f"{name}.jsonl"
            whole = path.read_bytes()
            handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, before[1]))
            try:
                with pytest.raises(ArealError, match=rf"cannot write .*{name}\.jsonl: "):
                    append()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
                signal.signal(signal.SIGXFSZ, handler)
            assert path.read_bytes() == whole
        folder.write(branched("1-0"))
        assert [each.episode for each in folder.episodes()] == ["0-0", "1-0"]


def test_folder_accepts_only_one_kind_of_run(tmp_path: Path) -> None:
    with open_folder(tmp_path, ASKED, parquet=False, resume=False):
        pass
    with open_folder(tmp_path, {**ASKED, "model": "other"}, parquet=False, resume=False) as folder:
        folder.write(branched())  # nothing was in it before
    with pytest.raises(Conflict, match="already contains a run"):
        open_folder(tmp_path, {**ASKED, "model": "other"}, parquet=False, resume=False)
    with pytest.raises(Conflict) as caught:
        open_folder(tmp_path, ASKED, parquet=False, resume=True)
    assert caught.value.detail == "model: other there, m now"
    (tmp_path / "run.json").unlink()
    with pytest.raises(Conflict, match=r"no run\.json"):
        open_folder(tmp_path, ASKED, parquet=False, resume=True)


def test_existing_parquet_replaces_json_lines(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with open_folder(tmp_path, ASKED, parquet=True, resume=False) as folder:
        folder.write(branched())
        lines = (tmp_path / "trajectories-00000.jsonl").read_bytes()
        folder.finish({}, complete=True)
    (tmp_path / "trajectories-00000.jsonl").write_bytes(lines)  # as a kill between the two leaves it
    (tmp_path / "trajectories-00001.tmp").write_bytes(b"half")
    with open_folder(tmp_path, ASKED, parquet=True, resume=True) as again:
        assert [each.episode for each in again.episodes()] == ["0-0"]
        again.finish({}, complete=True)
    assert sorted(each.name for each in tmp_path.glob("traj*")) == ["trajectories-00000.parquet"]
