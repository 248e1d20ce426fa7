"""``areal agent chat``, ``sessions``, ``reward`` and ``export`` through the gateway of a service of real processes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal.cli.traffic import agent_page, agent_traffic
from areal.client.gateway import GatewayClient
from tests.cli.conftest import Areal, Result, Spawner, Typist
from tests.services.agent.whole import WholeService, start_agents
from tests.services.processes import Processes, wait_until
from tests.services.tokenizer_folder import write_tokenizer

Agent = Callable[..., Result]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeService]:
    folder = tmp_path_factory.mktemp("service")
    processes = Processes(folder)
    try:
        tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
        engine = processes.engine(tokenizer)
        recorder = processes.data_proxy(engine, tokenizer, "--state-dir", str(folder / "recorded"))
        yield start_agents(processes, folder, recorder)
    finally:
        processes.stop()


@pytest.fixture
def reached(service: WholeService) -> list[str]:
    return ["--gateway", service.url, "--api-key-file", str(service.processes.key_file)]


@pytest.fixture
def agent(areal: Areal, reached: list[str]) -> Agent:
    """``areal agent ...`` of the service."""

    def call(*words: str) -> Result:
        return areal("agent", *words, *reached)

    return call


@pytest.fixture
def typed(tmp_path: Path, reached: list[str]) -> Callable[..., Typist]:
    return lambda *words: Typist(tmp_path / "home", "agent", "chat", *words, *reached)


def new_session(agent: Agent) -> str:
    return agent("sessions", "new", "-o", "name").out.strip()


def outcomes(agent: Agent, session: str) -> list[str]:
    return [turn["outcome"] for turn in agent("sessions", "show", session, "--json").json["recordedTurns"]]


# -- one shot


def test_one_shot_prints_answer_and_names_new_session(agent: Agent) -> None:
    result = agent("chat", "-m", "hello there")
    assert (result.code, result.out) == (0, "hello there\n")
    session = result.err.split()[-1]
    again = agent("chat", "--session", session, "-m", "history")
    assert (again.out, again.err) == ("2\n", "")


def test_chat_makes_new_session_current(agent: Agent) -> None:
    agent("chat", "-m", "model")
    assert "ready to be exported" in agent("reward", "1").out


def test_one_shot_continues_current_session(agent: Agent) -> None:
    session = new_session(agent)
    agent("chat", "-m", "hello")
    result = agent("chat", "-m", "history")
    assert result.out == "2\n" and session in result.err
    agent("sessions", "close", session)
    result = agent("chat", "-m", "history")
    assert result.out == "0\n"
    assert "session" in result.err and session not in result.err.splitlines()[-1]


def test_tool_calls_are_shown_beside_the_answer(agent: Agent) -> None:
    result = agent("chat", "-m", "weather")
    assert result.out == "Let me look.\nIt is 21 degrees.\n"
    assert '  -> weather({"city": "Paris"})' in result.err and "  <- 21 degrees" in result.err


def test_turn_document_contains_tool_calls(agent: Agent) -> None:
    document = agent("chat", "-m", "weather", "--json").json
    assert document["message"] == {"role": "assistant", "content": "Let me look.\nIt is 21 degrees."}
    assert [call["name"] for call in document["toolCalls"]] == ["weather"]
    assert document["toolResults"] == ["21 degrees"] and document["session"]


def test_no_stream_prints_whole_answer(agent: Agent) -> None:
    assert agent("chat", "--no-stream", "-m", "one two").out == "one two\n"


def test_piped_text_is_one_shot(service: WholeService, reached: list[str], spawn: Spawner) -> None:
    process = spawn("agent", "chat", *reached, stdin=-1)
    out, _ = process.popen.communicate("from a pipe\n", timeout=60)
    assert (process.popen.returncode, out) == (0, "from a pipe\n")


def test_failed_agent_is_reported_with_its_error(agent: Agent) -> None:
    result = agent("chat", "-m", "fail")
    assert result.code == 1 and "is to fail" in result.err


def test_empty_message_and_unknown_session_are_refused(agent: Agent) -> None:
    assert agent("chat", "-m", "  ").code == 2
    unknown = agent("chat", "--session", "absent", "-m", "x")
    assert unknown.code == 4 and "areal agent sessions list" in unknown.err


@pytest.mark.parametrize("key", ["", "\udcff", "a\tb"])
def test_invalid_session_key_is_refused(agent: Agent, key: str) -> None:
    agent("chat", "-m", "x")  # a current session, which is not meant
    for verb in ("chat -m x --session", "reward 1 --session", "sessions show", "sessions new", "sessions close"):
        refused = agent(*verb.split(), key)
        reason = "the key of a session must be 1 to 1024 bytes" if key else "it is empty"
        assert refused.code == 2 and reason in refused.err, verb


def test_ctrl_c_cancels_a_one_shot(agent: Agent, reached: list[str], spawn: Spawner) -> None:
    session = new_session(agent)
    process = spawn("agent", "chat", "--session", session, "-m", "wait", *reached)
    assert process.popen.stdout is not None and process.popen.stdout.read(7) == "waiting"
    process.popen.send_signal(signal.SIGINT)
    assert process.finish().code == 130
    wait_until(lambda: outcomes(agent, session) == ["cancelled"])


# -- the prompt


def test_prompt_streams_shows_tools_and_runs_commands(typed: Callable[..., Typist]) -> None:
    user = typed()
    user.until(">>> ")
    user.type("weather\n")
    user.until("-> weather")
    user.until("It is 21 degrees.")
    user.until(">>> ")
    user.type("/history\n")
    user.until("user: weather")
    user.until("-> weather")
    user.until(">>> ")
    user.type("/new\n")
    user.until("session sk-")
    user.until(">>> ")
    user.type("history\n")
    user.until("\n0\n")
    user.until(">>> ")
    user.type("/?\n")
    user.until("/close")
    user.until(">>> ")
    user.type("/nwe\n")
    user.until('did you mean "new"')
    user.type("/bye\n")
    assert user.code() == 0


def test_ctrl_c_cancels_turn_and_keeps_prompt(
    typed: Callable[..., Typist], agent: Agent, service: WholeService
) -> None:
    session = new_session(agent)
    user = typed("--session", session)
    user.until(">>> ")
    user.type("wait\n")
    user.until("waiting")
    user.type("\x03")
    user.until("(cancelled)", again="\x03")
    user.until(">>> ")

    wait_until(lambda: outcomes(agent, session) == ["cancelled"])
    user.type("hello\n")
    user.until("hello\n")
    user.until("hello\n>>> ")
    user.type("/bye\n")
    assert user.code() == 0


# -- sessions


def test_sessions_are_listed_shown_switched_and_closed(agent: Agent) -> None:
    assert agent("sessions", "new", "mine/1", "-o", "name").out == "mine/1\n"
    other = new_session(agent)
    agent("chat", "-m", "weather", "--session", "mine/1")
    rows = {row["sessionKey"]: row for row in agent("sessions", "list", "--json").items}
    assert rows["mine/1"]["turns"] == 1 and rows[other]["current"] and not rows["mine/1"]["current"]
    assert agent("sessions", "switch", "mine/1").code == 0
    assert any(row[:2] == ["*", "mine/1"] for row in agent("sessions", "list").rows)
    page = agent("sessions", "show", "mine/1").out
    assert page.startswith("mine/1: idle, 1 turns")
    assert "user: weather" in page and '-> weather({"city": "Paris"})' in page and "<- 21 degrees" in page
    assert agent("sessions", "close", "mine/1").code == 0
    for verb in ("show", "switch", "close"):
        assert agent("sessions", verb, "mine/1").code == 4


def test_session_is_found_by_unique_prefix(agent: Agent, tmp_path: Path) -> None:
    for key in ("mine-1", "mine-2", "other-1"):
        assert agent("sessions", "create", key, "-o", "name").out == f"{key}\n", "create is new"
    assert agent("chat", "-m", "model", "--session", "other").code == 0
    assert agent("sessions", "show", "oth").out.startswith("other-1: idle, 1 turns")
    assert agent("sessions", "switch", "other-").out == "other-1 is the current session\n"
    assert agent("reward", "1", "--session", "othe").code == 0
    assert agent("export", "--session", "oth", "--output", str(tmp_path / "o.json")).code == 0
    several = agent("sessions", "close", "mine")
    assert several.code == 2 and "2 sessions begin with mine: mine-1, mine-2" in several.err.replace(
        "mine-2, mine-1", "mine-1, mine-2"
    )
    assert agent("sessions", "close", "mine-1").code == 0
    assert agent("sessions", "close", "mine").out == "mine-2 is closed\n"
    assert agent("sessions", "close", "absent").code == 4


def test_failed_turn_is_shown_with_its_error(agent: Agent) -> None:
    session = new_session(agent)
    agent("chat", "-m", "fail")
    page = agent("sessions", "show", session).out
    assert ", agent]" in page and "failed: " in page and "is to fail" in page


def test_list_truncates_at_limit(agent: Agent) -> None:
    new_session(agent), new_session(agent)
    result = agent("sessions", "list", "--limit", "1", "-o", "name")
    assert len(result.out.splitlines()) == 1 and "more than 1" in result.err


# -- rewards


def test_reward_and_export_write_viewable_file(agent: Agent, areal: Areal, tmp_path: Path) -> None:
    session = new_session(agent)
    assert agent("chat", "-m", "model").out == "Hello there, friend!\n"
    rewarded = agent("reward", "0.5")
    assert "ready to be exported" in rewarded.out, rewarded.err
    file = tmp_path / "trajectory.json"
    exported = agent("export", "--session", session, "--output", str(file))
    assert (exported.code, exported.out) == (0, f"1 rows in {file}\n")
    (episode,) = areal("inf", "trajectories", "show", str(file), "--json").items
    assert episode["interactions"][0]["reward"] == 0.5
    assert areal("inf", "trajectories", "show", str(file)).code == 0
    (theirs := file.with_suffix(".tmp")).write_text("mine")
    for suffix in (".jsonl", ".parquet"):
        new_session(agent), agent("chat", "-m", "model"), agent("reward", "0.5")
        other = file.with_suffix(suffix)
        assert agent("export", "--output", str(other)).out == f"1 rows in {other}\n"
        (shown,) = areal("inf", "trajectories", "show", str(other), "--json").items
        assert shown["interactions"][0]["inputIds"] == episode["interactions"][0]["inputIds"]
    assert theirs.read_text() == "mine"


def test_second_export_has_later_trajectory(agent: Agent, tmp_path: Path) -> None:
    new_session(agent)
    agent("chat", "-m", "model"), agent("reward", "1"), agent("chat", "-m", "model")
    found = []
    for number in range(2):
        file = tmp_path / f"{number}.json"
        assert agent("export", "--output", str(file)).code == 0
        exported = json.loads(file.read_text())
        found.append(([row["trajectory_id"] for row in exported["rows"]], exported["traj"]["rewards"]))
        agent("reward", "0.25")
    assert found == [([0], [1.0]), ([1], [0.25])]


def test_unwritten_export_is_repeated_but_written_one_is_not(agent: Agent, tmp_path: Path) -> None:
    new_session(agent)
    agent("chat", "-m", "model"), agent("reward", "1")
    (taken := tmp_path / "folder.json").mkdir()
    failed = agent("export", "--output", str(taken))
    assert failed.code == 1 and "cannot write" in failed.err
    assert agent("export", "--output", str(tmp_path / "rows.json")).code == 0
    again = agent("export", "--output", str(tmp_path / "again.json"))
    assert again.code == 5 and not (tmp_path / "again.json").exists()


def test_negative_reward_is_not_parsed_as_flag(agent: Agent) -> None:
    session = new_session(agent)
    agent("chat", "-m", "model")
    for value in ("nan", "-inf", "1e400"):
        refused = agent("reward", value, "--session", session)
        assert refused.code == 2 and "a reward is a finite number" in refused.err
    assert agent("reward", "-1", "--session", session).out.startswith("reward -1: trajectory")


def test_reward_and_export_errors_name_missing_part(agent: Agent, tmp_path: Path) -> None:
    nowhere = agent("reward", "1")
    assert nowhere.code == 2 and "no session is selected" in nowhere.err
    unknown = agent("reward", "1", "--session", "absent")
    assert unknown.code == 4 and "session absent: no session has this key" in unknown.err
    session = new_session(agent)
    assert agent("reward", "1").code == 2
    assert agent("export", "--output", str(tmp_path / "x.json")).code == 5
    for file, code in (("x.npz", 2), ("no/such/x.json", 4)):
        assert agent("export", "--session", session, "--output", str(tmp_path / file)).code == code
    assert not list(tmp_path.glob("x.*"))


def test_current_session_is_stored_in_private_file(agent: Agent, tmp_path: Path, service: WholeService) -> None:
    session = new_session(agent)
    file = tmp_path / "home" / "current-sessions.json"
    assert session in file.read_text() and service.url in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    agent("sessions", "close", session)
    assert session not in file.read_text()


def test_damaged_session_file_counts_as_empty(agent: Agent, tmp_path: Path) -> None:
    file = tmp_path / "home" / "current-sessions.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text("{")
    assert agent("sessions", "list").code == 0
    assert agent("chat", "-m", "hello").out == "hello\n"
    assert agent("chat", "-m", "history").out == "2\n"


def test_remote_service_is_listed_with_its_health(agent: Agent) -> None:
    (row,) = agent("ps", "--json").items
    assert row["phase"] == "Ready"
    assert agent("status").code == 0


def test_traffic_counts_requests_since_last_look(agent: Agent, service: WholeService) -> None:
    traffic = agent_traffic(GatewayClient(service.url, service.key), lambda: {"data-proxy/0": service.proxies[0].url})
    assert traffic.look()["turnsPerSecond"] is None
    session = new_session(agent)
    assert [agent("chat", "-m", message).code for message in ("model", "fail")] == [0, 1]
    assert agent("reward", "1", "--session", session).code == 0
    seen = traffic.look()
    for name in ("turnsPerSecond", "failuresPerSecond", "rewardsPerSecond", "sessions"):
        assert seen[name] > 0, name
    for name in ("turnSeconds", "firstEventSeconds"):
        assert 0 < seen[name]["p50"] <= seen[name]["p99"], name
    (pair,) = seen["pairs"]
    assert pair["turnsPerSecond"] > 0 and pair["commitSeconds"]["p50"] > 0
    assert "/s failed" in agent_page(seen) and "data-proxy/0" in agent_page(seen)
