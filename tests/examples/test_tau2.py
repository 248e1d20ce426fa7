"""The tau2 example: whole episodes of a small domain, and of tau2-bench's mock domain where it is installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.api.cli_args import GRPOConfig, InferenceEngineConfig, load_expr_config
from areal.client import RolloutController
from areal.errors import UsageFault
from areal.rollout.workflows import AGENTS_ADDRESS, AGENTS_KEY_FILE
from examples.agents.tau2 import run_rollout
from examples.agents.tau2.domains import load_domain
from tests.examples.rooms import CODE
from tests.services.agent.whole import WholeService, start_agents
from tests.services.inference.data_proxy.dialects.talks import TEMPLATE
from tests.services.processes import Process, Processes, engine_calls, script
from tests.services.tokenizer_folder import write_tokenizer

ROOMS, SHEDS = "tests.examples.rooms:Rooms", "tests.examples.rooms:Sheds"
CONFIG = Path(run_rollout.__file__).with_name("rollout.yaml")
JOB = CONFIG.with_name("grpo.yaml")
LONG = "I have looked after it. " * 20 + f"It has the {CODE}."


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Stage:
    """An agent service of two pairs, the model of its agent, and the model of the user."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, Processes(folder)
        tokenizer = write_tokenizer(folder / "tokenizer", template=TEMPLATE)
        self.agent_engine, agent_proxy = self._model(tokenizer, "--state-dir", str(folder / "state"))
        self.user_engine, self.user_proxy = self._model(tokenizer)
        router = self.processes.router()
        self.inference = self.processes.gateway(router)
        self.processes.register(router, agent_proxy)
        agent = "examples.agents.tau2.agent:Tau2Agent"
        self.service: WholeService = start_agents(self.processes, folder, self.inference, pairs=2, agent=agent)

    def _model(self, tokenizer: Path, *flags: str) -> tuple[Process, Process]:
        engine = self.processes.engine(tokenizer)
        script(engine, max_model_len=100_000, flush=50)
        return engine, self.processes.data_proxy(engine, tokenizer, "--tool-call-parser", "hermes", *flags)

    def script(self, agent: list[list[str]], user: list[list[str]]) -> None:
        script(self.agent_engine, replies=agent, max_model_len=100_000, flush=50)
        script(self.user_engine, replies=user, max_model_len=100_000, flush=50)

    def overrides(self, *more: str) -> list[str]:
        return [
            f"agents.gateway_addr={self.service.url}",
            f"agents.admin_api_key_file={self.processes.key_file}",
            f"econfig.user_llm_base_url={self.user_proxy.url}/v1",
            "econfig.user_llm=tiny",
            "econfig.user_llm_key_env=USER_KEY",
            *more,
        ]

    def sessions(self) -> list[dict[str, Any]]:
        answer = self.service.gateway.call("GET", "/sessions", key=self.processes.key)
        return [each for each in answer.json()["sessions"] if each["state"] != "closed"]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("tau2"))
    yield stage
    stage.processes.stop()


@pytest.fixture
def keyed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setenv("USER_KEY", stage.processes.key)
    return stage


def played(stage: Stage, tmp_path: Path, *overrides: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code and the episodes by task."""
    output = tmp_path / "episodes.jsonl"
    code = run_rollout.main(["--config", str(CONFIG), *stage.overrides(*overrides, f"output={output}")])
    return code, {each["task"]: each for each in map(json.loads, output.read_text().splitlines())}


ROOM_NAMES = ("hall", "attic", "shed", "cellar")
AGENT = [
    ["is lit", LONG],
    *([f"light in the {room}", call("switch", room=room)] for room in ROOM_NAMES),
    ["Again", "What?"],
]
USER = [
    [CODE, "Thank you. ###STOP###"],
    ["Welcome to the attic", call("look", room="attic")],
    ["attic is dark", "I want light in the attic."],
    *([f"Welcome to the {room}", f"I want light in the {room}."] for room in ROOM_NAMES if room != "attic"),
    ["Welcome to the endless", "Again"],
    ["What?", "Again"],
]


def test_two_domain_batch_is_scored_by_text_and_actions(
    keyed: Stage, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The code is at the end of a long answer; lamps of one episode are none of another's; one agent fails."""
    keyed.script(AGENT, USER)
    tasks = [
        "econfig.tasks=[hall,attic,shed]",
        "train_dataset.batch_size=3",
        "max_batches=2",
        "gconfig.temperature=0.5",
    ]
    code, episodes = played(keyed, tmp_path, f"econfig.domain='{ROOMS},{SHEDS}'", *tasks)
    assert code == 0
    assert {task: each["reward"] for task, each in episodes.items()} == {"hall": 1.0, "attic": 1.0, "shed": 1.0}
    assert all(each["trajectories"] == 2 and each["ended"] == "user_stop" for each in episodes.values())
    assert [each["body"]["sampling"]["temperature"] for each in engine_calls(keyed.agent_engine)] == [0.5] * 12
    assert keyed.sessions() == []
    shown = capfd.readouterr().out.partition("all\n")[2].splitlines()
    assert [line.split() for line in shown[1:]] == [[ROOMS, "4", "0", "1.000"], [SHEDS, "2", "0", "1.000"]]


def test_failed_agent_has_no_reward_and_stops_no_other(keyed: Stage, tmp_path: Path) -> None:
    keyed.script(AGENT, USER)
    code, episodes = played(keyed, tmp_path, f"econfig.domain='{ROOMS}'", "econfig.tasks=[cellar,hall]")
    assert code == 0 and episodes["hall"]["reward"] == 1.0
    assert episodes["cellar"]["reward"] is None and "no lamp in the cellar" in episodes["cellar"]["failure"]
    assert keyed.sessions() == []


def test_batch_with_all_episodes_failed_is_an_error(keyed: Stage, tmp_path: Path) -> None:
    keyed.script(AGENT, USER)
    code, episodes = played(keyed, tmp_path, f"econfig.domain='{ROOMS}'", "econfig.tasks=[cellar]")
    assert code == 1 and episodes["cellar"]["reward"] is None


def test_unreachable_user_is_a_failure_without_reward(keyed: Stage, tmp_path: Path) -> None:
    away = "econfig.user_llm_base_url=http://127.0.0.1:1/v1"
    code, episodes = played(keyed, tmp_path, f"econfig.domain='{ROOMS}'", "econfig.tasks=[hall]", away)
    assert code == 1 and episodes["hall"]["reward"] is None and "APIConnectionError" in episodes["hall"]["failure"]


def test_endless_episode_is_scored_after_its_steps(keyed: Stage, tmp_path: Path) -> None:
    keyed.script(AGENT, USER)
    one = ["econfig.tasks=[endless]", "econfig.max_steps=5", "gconfig.n_samples=3", "train_dataset.batch_size=1"]
    code, episodes = played(keyed, tmp_path, f"econfig.domain='{ROOMS}'", *one)
    assert code == 0
    endless = episodes["endless"]
    assert (endless["ended"], endless["reward"], endless["messages"]) == ("max_steps", 0.0, 6)
    assert len((tmp_path / "episodes.jsonl").read_text().splitlines()) == 3, "a group of three"


def test_agent_only_calling_tools_stops_after_its_steps(keyed: Stage, tmp_path: Path) -> None:
    keyed.script([["", call("switch", room="hall")]], USER)
    one = ["econfig.tasks=[hall]", "econfig.max_steps=7"]
    _, episodes = played(keyed, tmp_path, f"econfig.domain='{ROOMS}'", *one)
    assert (episodes["hall"]["ended"], episodes["hall"]["reward"]) == ("max_steps", 0.0)


def test_job_episodes_are_exported_and_failed_one_is_dropped(keyed: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the example's own configuration of a job, which finds its agent service in the environment."""
    keyed.script(AGENT, USER)
    monkeypatch.setenv(AGENTS_ADDRESS, keyed.service.url)
    monkeypatch.setenv(AGENTS_KEY_FILE, str(keyed.processes.key_file))
    user = {"user_llm_base_url": f"{keyed.user_proxy.url}/v1", "user_llm": "tiny", "user_llm_key_env": "USER_KEY"}
    econfig = {**user, "max_steps": 9}
    given = [f"workflow_kwargs.econfig.{name}={value}" for name, value in econfig.items()]
    config, _ = load_expr_config(["--config", str(JOB), *given], GRPOConfig)
    places = [(ROOMS, "hall"), (ROOMS, "cellar"), (SHEDS, "shed"), (ROOMS, "endless")]
    rows = [{"domain": domain, "task": task} for domain, task in places]
    address, key = keyed.inference.url, keyed.processes.key
    limits = InferenceEngineConfig(request_timeout=60.0, setup_timeout=60.0)
    with RolloutController(limits, gateway_addr=address, admin_api_key=key, model="tiny") as rollout:
        kwargs = {**config.workflow_kwargs, "gconfig": config.gconfig}
        found = rollout.run_batch(rows, config.workflow, kwargs, group_size=2)
        (failure,) = rollout.failures()
    rewards = {each.data["task"]: each.trajectory["rewards"].tolist() for each in found}
    assert rewards == {"hall": [1.0] * 4, "shed": [1.0] * 4, "endless": [0.0] * 8}, "a row a model call, two episodes"
    assert "no lamp in the cellar" in str(failure.error) and failure.blame == "workflow"
    assert keyed.sessions() == []


def test_environment_variable_limits_batches(
    keyed: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    keyed.script(AGENT, USER)
    monkeypatch.setenv(run_rollout.MAX_BATCHES, "2")
    one = [f"econfig.domain='{ROOMS}'", "econfig.tasks=[hall]", "train_dataset.batch_size=1"]
    output = tmp_path / "episodes.jsonl"
    for more, batches in ([], 2), (["max_batches=1"], 3):
        assert played(keyed, tmp_path, *one, *more)[0] == 0
        assert len(output.read_text().splitlines()) == batches
    monkeypatch.setenv(run_rollout.MAX_BATCHES, "all")
    assert run_rollout.main(["--config", str(CONFIG), *keyed.overrides(*one)]) == 2
    assert "AREAL_MAX_BATCHES=all is not a number of batches" in capfd.readouterr().err


def test_other_package_named_tau2_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tau2.registry", None)
    load_domain.cache_clear()
    assert run_rollout.main(["--config", str(CONFIG), "econfig.domain=mock"]) == 4
    shown = capsys.readouterr().err
    assert "needs tau2-bench v0.2.0" in shown and "git clone -b v0.2.0" in shown and "Traceback" not in shown


def test_missing_domain_is_named() -> None:
    with pytest.raises(UsageFault, match=r"no module tests\.nowhere"):
        load_domain("tests.nowhere:Domain")


@pytest.mark.tau2
def test_mock_domain_of_tau2_bench(keyed: Stage, tmp_path: Path) -> None:
    """One task is done with a tool and the right words, one without the tool, one after an opening of its own."""
    pytest.importorskip("tau2.registry")
    confirmed = "The agent confirmed the task {} successfully"
    agent = [
        ["Create it", call("create_task", user_id="user_1", title="Important Meeting")],
        ["Important Meeting", confirmed.format("was created")],
        ["Mark it", confirmed.format("status was updated")],
    ]
    user = [["successfully", "###STOP###"], ["help you", "Create it"], ["", "Mark it"]]
    keyed.script(agent, user)
    tasks = ["create_task_1", "create_task_1_with_env_assertions", "update_task_with_message_history"]
    code, episodes = played(keyed, tmp_path, "econfig.domain=mock", f"econfig.tasks=[{','.join(tasks)}]")
    assert code == 0
    assert {task: each["reward"] for task, each in episodes.items()} == dict(zip(tasks, (1.0, 1.0, 0.0), strict=True))
    assert "create_task_1_nl_eval" in load_domain("mock").tasks(), "its reward has no part of a judge"
