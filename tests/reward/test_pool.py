"""Rewards in worker processes: their values, errors and timeouts."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.reward_api import AsyncRewardWrapper, RewardRaised, RewardTimeout
from areal.errors import UsageFault
from areal.reward.functions import Parameters, columns_read, name_of
from areal.reward.pool import close_pools_of_this_loop, jobs_of, number, open_pool_of_this_loop
from areal.rollout.rows import RowReward
from areal.training.checking import written_parameters
from tests.reward import rewards


@pytest.fixture(autouse=True)
async def pool() -> AsyncIterator[None]:
    yield
    await close_pools_of_this_loop()


async def test_reward_function_or_name_runs_in_other_process() -> None:
    by_function = AsyncRewardWrapper(rewards.length)
    by_name = AsyncRewardWrapper("tests.reward.rewards:length")
    assert await by_function("p", "abcd", [1], [2], scale=2.0) == 2.0
    assert await by_name("p", "abc", [1], [2]) == 3.0
    assert await AsyncRewardWrapper(rewards.process_id)() != os.getpid()


@pytest.mark.parametrize(
    ("reward", "error"),
    [
        (rewards.raises, "KeyError: 'answer'"),
        (rewards.exits, "SystemExit: no such unit"),
        (rewards.asks, "EOFError: EOF when reading a line"),
        (rewards.interrupts, "KeyboardInterrupt"),
        (rewards.tells_all, "ValueError: x{988}[.]{3}"),
    ],
)
async def test_raising_reward_is_reported_and_process_continues(reward: Any, error: str) -> None:
    before = await AsyncRewardWrapper(rewards.process_id, max_workers=1)()
    with pytest.raises(RewardRaised, match=rf"raised: {error} \(.*rewards.py:\d+, in {reward.__name__}\)$"):
        await AsyncRewardWrapper(reward, max_workers=1)("p", "c", [], [])
    assert await AsyncRewardWrapper(rewards.process_id, max_workers=1)() == before


async def test_number_that_cannot_be_serialized_fails_only_its_call() -> None:
    done = await AsyncRewardWrapper(rewards.of_own_class_if_long).each([(("p", each), {}) for each in ("abc", "abcd")])
    assert done[0] == 3.0 and "cannot be passed on" in str(done[1])


async def test_hanging_reward_is_killed_and_raises_timeout() -> None:
    with pytest.raises(RewardTimeout, match="hangs: no reward within"):
        await AsyncRewardWrapper(rewards.hangs, timeout_seconds=0.2, max_retries=1)()
    assert await AsyncRewardWrapper(rewards.length)("p", "abc", [1], [2]) == 3.0


async def test_slow_import_is_not_counted_as_reward_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_rewards.py").write_text("import time\ntime.sleep(0.5)\ndef one(*a, **k): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert await AsyncRewardWrapper("slow_rewards:one", timeout_seconds=0.3, max_retries=0)() == 1.0
    with pytest.raises(RewardRaised, match=r"cannot be imported(.|\n)*no_such_module"):
        await AsyncRewardWrapper("no_such_module:one")()


async def test_dead_process_is_replaced_and_reward_computed(tmp_path: Path) -> None:
    reward = AsyncRewardWrapper(rewards.dies_once)
    assert await reward("p", "c", [], [], mark=str(tmp_path / "mark")) == 1.0


@pytest.mark.parametrize("value", ["4", "0.5", b"1", None, [1.0], 1j])
def test_reward_that_is_no_number_is_refused_with_its_value(value: object) -> None:
    with pytest.raises(RewardRaised, match=re.escape(f"a reward must be a number, not {value!r}")):
        number(value)
    assert [number(each) for each in (True, np.float32(0.5), np.int64(3))] == [1.0, 0.5, 3.0]


@pytest.mark.parametrize("function", [rewards.not_finite, rewards.past_float, rewards.past_float32])
async def test_non_finite_float32_reward_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(RewardRaised, match="finite, within the range of float32"):
        await AsyncRewardWrapper(function)()


async def test_coroutine_function_runs_in_this_process() -> None:
    assert await AsyncRewardWrapper(rewards.later)("p", "c", [], []) == 0.5


async def test_unpicklable_argument_is_refused() -> None:
    with pytest.raises(RewardRaised, match="cannot go to another process"):
        await AsyncRewardWrapper(rewards.length)("p", lambda: None, [], [])


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        (rewards.Scorer(2.0).method, 8.0),
        (rewards.Scorer.of_class, 4.0),
        (rewards.Scorer().of_class, 4.0),
        (rewards.Scorer(3.0), 12.0),
        (rewards.Scorer(0.5).later, 0.5),
        (rewards.AsyncScorer(), 0.25),
        (functools.partial(rewards.scaled, 3.0), 12.0),
        (functools.partial(rewards.length, scale=4.0), 1.0),
        (functools.partial(rewards.Scorer(2.0).method, answer="4"), 8.0),
        (functools.partial(rewards.later), 0.5),
        (functools.partial(functools.partial(rewards.scaled, 3.0)), 12.0),
        (rewards.decorated, 8.0),
        (rewards.decorated.__wrapped__, 4.0),
        ("tests.reward.rewards.later", 0.5),
        ("tests.reward.rewards:Scorer.of_class", 4.0),
        (lambda prompt, completions, *_: len(completions), 4.0),
        (lambda *_: rewards.later("p", "c", [], []), 0.5),
    ],
)
async def test_any_callable_can_be_reward(function: Any, reward: float) -> None:
    wrapper = AsyncRewardWrapper(function)
    assert await wrapper("p", "abcd", [1], [2]) == reward
    assert await wrapper.each([(("p", "abcd", [1], [2]), {})] * 3) == [reward] * 3


async def test_object_is_sent_with_its_state_at_call() -> None:
    scorer = rewards.Scorer()
    reward = AsyncRewardWrapper(scorer.method)
    scorer.scale = 5.0
    assert await reward("p", "abc", [], []) == 15.0
    assert scorer.calls == 0
    assert await AsyncRewardWrapper(functools.partial(rewards.process_id, scale=1.0))() != os.getpid()


async def test_closure_runs_in_this_process_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    lock = threading.Lock()

    def locked(prompt: str, completions: str, *_: Any) -> float:
        with lock:
            return float(os.getpid())

    assert await AsyncRewardWrapper(locked)("p", "c") == os.getpid()
    assert "locked cannot go to another process" in caplog.text
    with pytest.raises(RewardRaised, match=r"raised: KeyError: 'no' \(.*test_pool.py:\d+, in <lambda>\)"):
        await AsyncRewardWrapper(lambda: dict[str, str]()["no"])()
    with pytest.raises(RewardRaised, match="raised: SystemExit: 3"):
        await AsyncRewardWrapper(lambda: sys.exit(3))()


TYPED = """
import asyncio, functools
from areal.api.reward_api import AsyncRewardWrapper

class Scorer:
    def __call__(self, prompt, completions, *own):
        return float(len(completions))

def length(prompt, completions, *own, scale=1.0):
    return scale * len(completions)

for reward in (length, Scorer(), functools.partial(length, scale=2.0)):
    print(asyncio.run(AsyncRewardWrapper(reward)("p", "abc", [], [])))
"""


@pytest.mark.parametrize("argv", [["-"], ["-c", TYPED]], ids=["stdin", "command"])
def test_reward_of_interactive_program_runs_on_thread(argv: list[str]) -> None:
    typed = TYPED if argv == ["-"] else ""
    ran = subprocess.run([sys.executable, *argv], input=typed, capture_output=True, text=True, timeout=60)
    assert ran.stdout.split() == ["3.0", "3.0", "6.0"], ran.stderr
    assert "a notebook or an interactive session" in ran.stderr


async def test_hanging_closure_is_interrupted_at_deadline() -> None:
    ended = threading.Event()

    def endless() -> float:
        try:
            while True:
                pass
        finally:
            ended.set()

    with pytest.raises(RewardTimeout, match=r"endless: no reward within 0.1 s"):
        await AsyncRewardWrapper(endless, timeout_seconds=0.1, max_retries=0)()
    assert await asyncio.to_thread(ended.wait, 60.0)


@pytest.mark.parametrize("given", [None, 3, rewards.Scorer])
def test_non_callable_object_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="a reward is a function, an object to call, or the name of one"):
        AsyncRewardWrapper(given)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "message"),
    [
        (rewards.length, ("p", "c"), {}, "missing a required argument: 'prompt_ids'"),
        (rewards.no_extra, ("p", "c", [], []), {"answer": "", "x": 1}, "got an unexpected keyword argument 'x'"),
        (rewards.Scorer().method, ("p",), {}, "missing a required argument: 'completions'"),
        (rewards.later, (), {}, "missing a required argument: 'prompt'"),
        (lambda prompt: 1.0, (), {}, "missing a required argument: 'prompt'"),
    ],
)
async def test_unaccepted_reward_arguments_are_refused_with_signature(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    wrapper = AsyncRewardWrapper(function)
    with pytest.raises(UsageFault) as caught:
        await wrapper(*args, **kwargs)
    assert message in str(caught.value) and f"the reward {name_of(function)}(" in str(caught.value)
    with pytest.raises(UsageFault):
        await wrapper.each([(args, kwargs)])


ROW = {"messages": [], "answer": "7", "prompt": "its own column", "level": 3}


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        (rewards.only_some, 1.0),
        (rewards.in_another_order, 1.0),
        (rewards.by_keyword, 6.0),
        (rewards.no_extra, 1.0),
        (rewards.other_names, 1.0),
        (functools.partial(rewards.no_extra, answer="8"), 1.0),
        (rewards.Scorer(2.0).method, 2.0),
        ("tests.reward.rewards.only_some", 1.0),
        (lambda completions, level: level, 3.0),
        (lambda *own, level: level + len(own), 7.0),
        (lambda **given: float(given.keys() == {*ROW, "completions", "prompt_ids", "completion_ids"}), 1.0),
    ],
)
async def test_row_reward_gets_columns_it_accepts(function: Any, reward: float) -> None:
    of_row = RowReward(function)
    of_row.check(ROW)
    assert await of_row("q", "7", [1], [2, 3, 4], ROW) == reward
    assert await of_row.each("q", [1], [("7", [2, 3, 4])] * 2, ROW) == [reward] * 2


def test_mismatched_call_is_refused_also_after_matching_one() -> None:
    own = ("p", "abc", [1], [2])
    parameters = Parameters.of(rewards.no_extra)
    for _ in range(2):
        parameters.check(own, {"answer": "7"})
        for args, kwargs in ((("p",), {"answer": "7"}), (own, {}), (own, {"answer": "7", "other": 1})):
            with pytest.raises(UsageFault, match=r"the reward no_extra.* cannot be called"):
                parameters.check(args, kwargs)


def test_row_without_reward_column_is_refused_before_sampling() -> None:
    with pytest.raises(UsageFault, match="missing a required argument: 'answer'") as caught:
        RowReward(rewards.only_some).check({"messages": [], "solution": "7"})
    assert "a row has messages, solution" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("body", "columns"),
    [
        ('return float(c == data["a"])', ("a",)),
        ('x = int(data["a"]); return 1.0 if c == x + data["b"] else data["c"]', ("a", "b")),
        ('if data["a"] and data["b"]: return 1.0\n    return data["c"]', ("a",)),
        ('for each in data["a"]: c += data["b"]', ("a",)),
        ('try: return data["a"]\n    except KeyError: return 0.0', ()),
        ('x = data.get("a"); return data["b"]', ()),
        ('data["a"] = 1; return data["a"]', ()),
        ('return 0.0 if "a" not in data else data["a"]', ()),
        ("return score(data)", ()),
        ('return max(data["a"][key] for key in data["b"])', ()),
    ],
)
def test_columns_read_whatever_the_values_are(body: str, columns: tuple[str, ...]) -> None:
    (function,) = ast.parse(f"def reward(c, **data):\n    {body}").body
    assert isinstance(function, ast.FunctionDef) and columns_read(function) == columns


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        ("prompt: str, completions: str | None, **data: list", ""),
        (
            "prompt: 'str', completions: Optional['str'], prompt_ids: list[int], completion_ids: typing.Sequence[int]",
            "",
        ),
        ("completions: list[str] | str, level: list[int]", ""),
        ("a: Text, b: Any, c: torch.Tensor, d: Annotated[list[int], 'ids'], answer) -> Awaitable[float", ""),
        ("prompt: str, completion: str, *rest, answer: dict, **row", ""),
        ("*given, answer: list[int]", ""),
        ("completions: list[list[dict[str, str]]], **kwargs", "completions is one text"),
        ("completions: 'Optional[typing.List[str]]'", "completions is one text"),
        ("prompt, completions, completion_ids: list[list[int]]", "completion_ids is one list of token ids"),
        ("prompts: list[str], answers: list[str], a, b", "prompts is one text, answers is one text"),
        ("completions) -> list[float | None", "a reward is one number"),
        ("largest: int) -> Callable[..., list[float]", "a reward is one number"),
    ],
)
def test_batch_reward_is_detected_by_annotations(tmp_path: Path, parameters: str, fault: str) -> None:
    ends = "]" * (parameters.count("[") - parameters.count("]")) if "->" in parameters else ")"
    (tmp_path / "written.py").write_text(f"def reward({parameters}{ends}: ...\n")
    for found in (
        written_parameters("written:reward", [str(tmp_path)]),
        Parameters.of(annotated(f"def reward({parameters}{ends}: ...\n")),
    ):
        if fault:
            with pytest.raises(UsageFault, match=re.escape(fault)):
                found.check_types()
        else:
            found.check_types()


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        ("prompt, completions, answer: str, level: str, **row", {"kind": "k"}),
        ("completion, answer, level, kind", {}),
        ("a, b, c, d, answer", {}),  # the four by position
        ("answer, level, /, *rest", {}),  # by position, whatever the names
    ],
)
def test_parameters_that_are_columns_are_passed_by_name(parameters: str, given: dict[str, str]) -> None:
    found = Parameters.of(annotated(f"def reward({parameters}): ...\n"))
    found.check_types()
    row = {"answer": "7", "level": "hard", "kind": "k"}
    args, kwargs = found.call(("p", "c", [1], [2]), row, {"completion": "c"})
    assert found.signature is not None
    bound = found.signature.bind(*args, **kwargs).arguments
    if "/" in parameters or parameters.startswith("a,"):
        assert args == ("p", "c", [1], [2])
    else:
        assert args == () and {name: bound[name] for name in ("answer", "level")} == {"answer": "7", "level": "hard"}
        assert given.items() <= bound.get("row", {}).items()
    with pytest.raises(UsageFault, match="missing a required argument: 'level'"):
        Parameters.of(annotated("def reward(prompt, completions, answer, level): ...\n")).call(
            ("p", "c", [1], [2]), {"answer": "7"}
        )


def batch(completions: list[str], answer: list[str]) -> list[float]:
    return [float(each == right) for each, right in zip(completions, answer, strict=True)]


@functools.wraps(batch)
def of_one(completions: str, answer: str) -> float:
    return batch([completions], [answer])[0]


class OfOne:
    def batch(self, completions: list[str], answer: list[str]) -> list[float]:
        return batch(completions, answer)

    @functools.wraps(batch)  # that of the class
    def __call__(self, completions: str, answer: str) -> float:
        return of_one(completions, answer)


@pytest.mark.parametrize("function", [of_one, functools.partial(of_one), OfOne(), OfOne().__call__])
def test_wrapper_of_a_reward_of_a_batch_rewards_one_response(function: Any) -> None:
    found = Parameters.of(function)
    found.check_types()
    args, kwargs = found.call(("p", "7", [1], [2]), {"answer": "7", "level": 3})
    assert function(*args, **kwargs) == 1.0
    with pytest.raises(UsageFault, match="completions is one text, a reward is one number"):
        Parameters.of(batch).check_types()


@pytest.mark.parametrize(
    "reward",
    [rewards.length, rewards.only_some, rewards.in_another_order, rewards.by_keyword, rewards.no_extra],
    ids=name_of,
)
def test_responses_of_one_row_get_the_arguments_of_single_calls(reward: Any) -> None:
    parameters, row = Parameters.of(reward), {"answer": "7", "prompt": "hidden"}
    owns = [("p", text, [1, 2], [len(text)]) for text in ("7", "", "12")]
    assert parameters.calls(owns, row) == [parameters.call(own, row) for own in owns]


def annotated(source: str) -> Any:
    """The function, with annotations that are text."""
    names: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source, names)
    return names["reward"]


def test_trl_rewards_are_refused_by_signature() -> None:
    rewards_of_trl = pytest.importorskip("trl.rewards")
    for name in ("accuracy_reward", "think_format_reward", "get_soft_overlong_punishment"):
        for found in (
            Parameters.of(getattr(rewards_of_trl, name)),
            written_parameters(f"trl.rewards.{name}", sys.path),
        ):
            with pytest.raises(UsageFault, match=f"the reward {name}"):
                found.check_types()
                found.call(("p", "c", [1], [2]), {"solution": "1"})


async def test_main_script_object_runs_in_other_process(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        "import asyncio, functools, os\n"
        "from dataclasses import dataclass\n"
        "from areal.api.reward_api import AsyncRewardWrapper\n"
        "@dataclass\n"
        "class Scorer:\n"
        "    scale: float\n"
        "    def score(self, *args):\n"
        "        return self.scale * (os.getpid() != int(os.environ['DRIVER']))\n"
        "def plain(scale, *args):\n"
        "    return Scorer(scale).score()\n"
        "async def main():\n"
        "    for each in (Scorer(3.0).score, functools.partial(plain, 3.0)):\n"
        "        print(await AsyncRewardWrapper(each)('p', 'c', [], []))\n"
        "if __name__ == '__main__':\n"
        "    os.environ['DRIVER'] = str(os.getpid())\n"
        "    asyncio.run(main())\n"
    )
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    assert out.decode().split() == ["3.0", "3.0"], err.decode()


def ran_by(loop: str, coroutine: Coroutine[Any, Any, float]) -> float:
    try:
        return pytest.importorskip("uvloop").run(coroutine) if loop == "uvloop" else asyncio.run(coroutine)
    finally:
        coroutine.close()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_process_killed_while_idle_is_replaced_without_retry(loop: str) -> None:
    async def killed_between() -> float:
        reward = AsyncRewardWrapper(rewards.process_id, max_workers=1, max_retries=0)
        process = int(await reward())
        os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # until it is reaped
            while True:
                os.kill(process, 0)
                await asyncio.sleep(0.01)
        try:
            return await reward() - process
        finally:
            await close_pools_of_this_loop()

    assert ran_by(loop, killed_between()) != 0


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_process_dying_on_long_argument_is_retried(loop: str, tmp_path: Path) -> None:
    async def dies() -> float:
        try:
            return await AsyncRewardWrapper(rewards.dies_once)("p", "c" * 10_000_000, [], [], mark=str(tmp_path / "m"))
        finally:
            await close_pools_of_this_loop()

    assert ran_by(loop, dies()) == 1.0


async def test_many_rewards_share_two_processes() -> None:
    reward = AsyncRewardWrapper(rewards.process_id)
    assert len(set(await asyncio.gather(*(reward() for _ in range(20))))) <= 2


async def test_each_worker_count_has_its_own_processes() -> None:
    for workers in (1, 3):
        reward = AsyncRewardWrapper(rewards.process_id, max_workers=workers)
        assert len(set(await asyncio.gather(*(reward() for _ in range(20))))) == workers


async def test_reopened_pool_keeps_its_processes() -> None:
    open_pool_of_this_loop(1)
    first = await AsyncRewardWrapper(rewards.process_id)()
    open_pool_of_this_loop(4)
    assert await AsyncRewardWrapper(rewards.process_id)() == first


async def test_each_returns_errors_beside_values() -> None:
    reward = AsyncRewardWrapper(rewards.tricky, timeout_seconds=0.3, max_retries=0)
    for _ in range(2):  # one by one until the function's duration is known, then in one job
        first, raised, last = await reward.each([((prompt,), {}) for prompt in ("1", "raises", "0.5")])
        assert (first, last) == (1.0, 0.5)
        assert isinstance(raised, RewardRaised) and "KeyError: 'answer'" in str(raised)
    first, hung, last = await reward.each([((prompt,), {}) for prompt in ("1", "hangs", "0.5")])
    assert (first, last) == (1.0, 0.5)
    assert isinstance(hung, RewardTimeout)


async def test_result_that_cannot_be_serialized_fails_only_its_call() -> None:
    reward = AsyncRewardWrapper(rewards.tricky, timeout_seconds=5, max_retries=0)
    for _ in range(2):  # one by one until the function's duration is known, then in one job
        first, generator, last = await reward.each([((prompt,), {}) for prompt in ("1", "yields", "0.5")])
        assert (first, last) == (1.0, 0.5)
        assert "tricky raised: TypeError: its result <generator object" in str(generator)
        assert str(generator).endswith("cannot be passed on: cannot pickle 'generator' object")


async def test_each_runs_functions_in_one_process_and_coroutines_in_caller() -> None:
    reward = AsyncRewardWrapper(rewards.process_id)
    await reward.each([((), {})] * 8)
    assert len(set(await reward.each([((), {})] * 8))) == 1
    assert await AsyncRewardWrapper(rewards.later).each([(("p", "c", [], []), {})] * 2) == [0.5, 0.5]


async def test_concurrent_each_calls_share_a_job() -> None:
    reward = AsyncRewardWrapper(rewards.process_id)
    await reward.each([((), {})])
    alike = await asyncio.gather(*(reward.each([((), {})] * 3) for _ in range(5)))
    assert [len(each) for each in alike] == [3] * 5
    assert len({process for each in alike for process in each}) == 1  # separate jobs would go to two processes


async def test_each_beside_hanging_one_returns_its_rewards() -> None:
    reward = AsyncRewardWrapper(rewards.tricky, timeout_seconds=1.0, max_retries=0)
    await reward.each([(("1",), {})])
    good, bad = await asyncio.gather(reward.each([(("0.5",), {})]), reward.each([(("hangs",), {})]))
    assert good == [0.5]
    assert isinstance(bad[0], RewardTimeout)


@given(st.lists(st.integers(1, 20), max_size=30), st.floats(1e-6, 0.1))
def test_jobs_keep_order_and_time_limit(counts: list[int], seconds: float) -> None:
    jobs = jobs_of(counts, seconds)
    assert [place for job in jobs for place in job] == list(range(len(counts)))
    assert all(len(job) == 1 or sum(counts[place] for place in job) * seconds <= 0.02 for job in jobs)


async def test_always_hanging_reward_is_reported_and_not_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reward = AsyncRewardWrapper(rewards.hangs, timeout_seconds=0.01, max_retries=100)
    with pytest.raises(RewardTimeout):
        await reward()
    assert caplog.records[0].message == "hangs: no reward within 0.01 s (attempt 1 of 101)"
    assert len(caplog.records) == 8
    with pytest.raises(RewardTimeout):
        await reward()
    assert len(caplog.records) == 9


async def test_rewards_queued_behind_hanging_one_end_soon(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reward = AsyncRewardWrapper(rewards.tricky, timeout_seconds=0.05, max_workers=2)
    ends = await reward.each([(("hangs",), {})] * 200)
    assert all(isinstance(end, RewardTimeout) for end in ends)
    assert len(caplog.records) < 20  # each takes a whole timeout
    assert await reward("0.5") == 0.5  # the function is called again later
