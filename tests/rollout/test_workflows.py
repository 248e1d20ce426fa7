"""WorkflowResolver against a real model that reverses digits, sometimes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.api.cli_args import AgentConfig, GenerationHyperparameters, InferenceEngineConfig
from areal.api.io_struct import ModelResponse
from areal.api.workflow_api import ChatModel, Environment, RolloutWorkflow
from areal.client import InferenceClient, RolloutController, RolloutsFailed
from areal.errors import UsageFault
from areal.rollout.agents import AgentServiceWorkflow
from areal.rollout.tensors import RewardedResponse, row
from areal.rollout.workflows import GroupedWorkflow, OnlineEpisodes, WorkflowResolver
from areal.utils.hf_utils import load_hf_tokenizer
from areal.workflow.environment import EnvironmentWorkflow
from areal.workflow.multi_turn import MultiTurnWorkflow
from areal.workflow.rlvr import RLVRWorkflow
from tests.client.conftest import Place
from tests.reward.rewards import never_right, reverse_reward
from tests.services.processes import wait_ready

GCONFIG = GenerationHyperparameters(max_new_tokens=8, n_samples=4)
NO_REWARD = 3
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": digits}], "answer": digits[::-1]} for digits in ("1234", "5678")
]


@pytest.fixture(scope="module")
def tokenizer(digits: Place) -> Any:
    return load_hf_tokenizer(str(digits.folder))


@pytest.fixture
def controller(digits: Place) -> Iterator[RolloutController]:
    yield from controller_of(digits)


def controller_of(place: Place, **fields: Any) -> Iterator[RolloutController]:
    fields = {"consumer_batch_size": 2, **fields}
    config = InferenceEngineConfig(request_timeout=60, setup_timeout=60, **fields)
    with RolloutController(config, gateway_addr=place.proxy.url, admin_api_key=place.key, model="digits") as made:
        yield made


def sampled(trajectory: dict[str, torch.Tensor], place: int = 0) -> list[int]:
    ids, mask = trajectory["input_ids"][place], trajectory["loss_mask"][place]
    return [int(token) for token in ids[mask.bool()]]


def test_rlvr_rows_match_forward_pass(digits: Place, controller: RolloutController, tokenizer: Any) -> None:
    kwargs = {"reward_fn": reverse_reward, "gconfig": GCONFIG, "tokenizer": tokenizer}
    batch = controller.rollout_batch(ROWS, RLVRWorkflow, kwargs, group_size=4)
    assert [len(each["input_ids"]) for each in batch] == [4, 4]
    for data, group in zip(ROWS, batch, strict=True):
        for place in range(4):
            text = tokenizer.decode(sampled(group, place), skip_special_tokens=True)
            assert float(group["rewards"][place]) == float(text.strip() == data["answer"])
    assert_logprobs_are_the_models(digits.folder, batch[0])


def assert_logprobs_are_the_models(folder: Path, group: dict[str, torch.Tensor]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for place in range(len(group["input_ids"])):
        length = int(group["attention_mask"][place].sum())
        ids = group["input_ids"][place, :length]
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        mine = logprobs[torch.arange(length - 1), ids[1:]]
        mask = group["loss_mask"][place, 1:length].bool()
        torch.testing.assert_close(mine[mask], group["logprobs"][place, 1:length][mask], atol=1e-4, rtol=0)
        assert set(group["versions"][place, 1:length][mask].tolist()) == {0}


def test_truncation_mark_follows_stop_reason(controller: RolloutController, tokenizer: Any) -> None:
    for budget, truncated in ((2, True), (32, False)):
        workflow = RLVRWorkflow(reverse_reward, GCONFIG.new(max_new_tokens=budget, greedy=True), tokenizer)
        (group,) = controller.rollout_batch(ROWS[:1], workflow, group_size=3)
        assert group["truncated"].tolist() == [truncated] * 3


def test_prompt_may_come_from_custom_functions(controller: RolloutController, tokenizer: Any) -> None:
    workflow = RLVRWorkflow(
        reverse_reward,
        GCONFIG,
        tokenizer,
        get_input_ids_fn=lambda prompt, tokenizer, thinking: tokenizer.encode(f"<bos>{prompt}="),
        data_extract_prompt_fn=lambda data: data["number"],
    )
    plain = RLVRWorkflow(reverse_reward, GCONFIG, tokenizer)
    (mine,) = controller.rollout_batch([{"number": "1234", "answer": "4321"}], workflow)
    (by_template,) = controller.rollout_batch(ROWS[:1], plain)
    (by_ids,) = controller.rollout_batch([{"input_ids": tokenizer.encode("<bos>1234="), "answer": ""}], plain)
    prompts = [each["input_ids"][each["loss_mask"] == 0].tolist() for each in (mine, by_template, by_ids)]
    assert prompts[0] == prompts[1] == prompts[2]


def test_workflow_is_loaded_by_name_and_tokenizer_by_folder(digits: Place, controller: RolloutController) -> None:
    kwargs = {
        "reward_fn": "tests.reward.rewards:reverse_reward",
        "gconfig": GCONFIG,
        "tokenizer": str(digits.folder),
        "enable_thinking": False,
    }
    batch = controller.prepare_batch(ROWS, "areal.workflow.rlvr.RLVRWorkflow", kwargs, group_size=2)
    assert len(batch) == 2 and all(len(each["rewards"]) == 2 for each in batch)


def test_turns_continue_from_sampled_tokens(controller: RolloutController, tokenizer: Any) -> None:
    workflow = MultiTurnWorkflow(never_right, GCONFIG, tokenizer, max_turns=3, turn_discount=0.5, feedback="9876")
    (trajectory, _) = controller.rollout_batch(ROWS, workflow)
    assert sorted(set(trajectory["turn_ids"][0].tolist())) == [-1, 0, 1, 2]
    text = tokenizer.decode(trajectory["input_ids"][0].tolist())
    assert text.count("9876=") == 2
    assert trajectory["rewards"].tolist() == [0.0]
    masked = trajectory["versions"][0][trajectory["loss_mask"][0] == 0]
    assert masked.unique().tolist() == [-1]


def test_episode_with_full_context_ends_with_its_answer(controller: RolloutController, tokenizer: Any) -> None:
    workflow = MultiTurnWorkflow(never_right, GCONFIG, tokenizer, max_turns=3, feedback="9876" * 1000)
    (trajectory,) = controller.rollout_batch(ROWS[:1], workflow)
    assert sorted(set(trajectory["turn_ids"][0].tolist())) == [-1, 0]
    assert "9876" not in tokenizer.decode(trajectory["input_ids"][0].tolist())


def test_first_right_answer_ends_episode_with_turn_discount(controller: RolloutController, tokenizer: Any) -> None:
    workflow = MultiTurnWorkflow(reverse_reward, GCONFIG, tokenizer, max_turns=4, turn_discount=0.5, feedback="1234")
    for trajectory in controller.rollout_batch([ROWS[0]] * 12, workflow):
        turns, reward = int(trajectory["turn_ids"].max()) + 1, float(trajectory["rewards"])
        assert reward in (0.0, 0.5 ** (turns - 1))
        assert turns == 4 or reward > 0


class Mathematician:
    """An agent as a user writes it, with OpenAI's client."""

    def __init__(self, turns: int = 1, by_turn: bool = False) -> None:
        self._turns, self._by_turn = turns, by_turn

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        import openai

        client = openai.AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
            max_retries=0,
        )
        messages, ids = list(data["messages"]), []
        for _ in range(self._turns):
            answer = await client.chat.completions.create(
                model=extra_kwargs["model"], messages=messages, max_completion_tokens=8
            )
            ids.append(answer.id)
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, data["messages"][0]]
        if data.get("reject"):
            return None
        return {each: float(place + 1) for place, each in enumerate(ids)} if self._by_turn else 1.0


def test_openai_client_agent_gives_rows_of_engine_output(controller: RolloutController) -> None:
    batch = controller.rollout_batch(ROWS, Mathematician(), group_size=2)
    assert [each["rewards"].tolist() for each in batch] == [[1.0, 1.0], [1.0, 1.0]]
    assert all(sampled(each) for each in batch)


def test_turn_rewards_are_discounted_along_conversation(digits: Place) -> None:
    agent = AgentConfig(turn_discount=0.5, export_style="individual")
    for controller in controller_of(digits, agent=agent):
        (trajectory,) = controller.rollout_batch(ROWS[:1], Mathematician, {"turns": 3, "by_turn": True})
    assert trajectory["original_rewards"].tolist() == [1.0, 2.0, 3.0]
    assert trajectory["rewards"].tolist() == [1.0 + 0.5 * 3.5, 2.0 + 0.5 * 3.0, 3.0]


class NoSession(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None: ...


def test_turn_discount_and_export_style_apply_to_any_workflow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent = AgentConfig(turn_discount=0.5, export_style="concat")
    address = {"address": "http://127.0.0.1:9"}
    for workflow, kwargs in ((Mathematician, {}), (OnlineEpisodes, {}), (AgentServiceWorkflow, address)):
        found = WorkflowResolver(agent).resolve(workflow, kwargs)
        assert (found._discount, found._style) == (0.5, "concat"), workflow  # type: ignore[attr-defined]
    stated = WorkflowResolver(agent).resolve(AgentServiceWorkflow, {**address, "discount": 1.0, "style": "individual"})
    assert (stated._discount, stated._style) == (1.0, "individual")  # type: ignore[attr-defined]
    assert not caplog.messages
    WorkflowResolver(agent).resolve(NoSession)
    assert "turn_discount and export_style have no effect: NoSession exports no session" in caplog.text


def test_agent_without_reward_is_rejected_and_leaves_nothing(digits: Place, controller: RolloutController) -> None:
    assert controller.rollout_batch([{**ROWS[0], "reject": True}], Mathematician) == []
    left = digits.proxy.call("GET", "/rl/sessions?limit=1000", key=digits.key).json()["sessions"]
    assert [each["task_id"] for each in left if each["state"] != "removed" and each["task_id"] != "__hitl__"] == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": ""}, "this one has prompt"),
        ({"prompt": 5}, "this one has int 5"),
        ({"prompt": "1234", "when": int}, "cannot be written as JSON: Type is not JSON serializable: type"),
    ],
)
def test_row_invalid_for_agent_service_is_reported(
    controller: RolloutController, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(RolloutsFailed, match=message):
        controller.rollout_batch([row], AgentServiceWorkflow, {"address": "http://127.0.0.1:9"})


def test_online_mode_takes_user_trajectories(digits: Place) -> None:
    with InferenceClient(digits.proxy.url, digits.key, model="digits") as client:
        for number in range(2):
            session = client.start_session("a user", online=True)
            session.chat(ROWS[0]["messages"], max_tokens=8)
            session.reward(float(number))
        for controller in controller_of(digits, agent=AgentConfig(mode="online")):
            batch = controller.prepare_batch(None)
        assert sorted(each["rewards"].tolist() for each in batch) == [[0.0], [1.0]]
        session = client.start_session("a user", online=True)
        chat = session.chat(ROWS[0]["messages"], max_tokens=8)
        reply = [{"role": "assistant", "content": chat["choices"][0]["message"]["content"]}, *ROWS[0]["messages"]]
        session.chat([*ROWS[0]["messages"], *reply], max_tokens=8)
        session.reward(1.0)
        for controller in controller_of(
            digits, agent=AgentConfig(mode="online", turn_discount=0.25), consumer_batch_size=1
        ):
            (discounted,) = controller.prepare_batch(None)
        assert discounted["rewards"].tolist() == [0.25, 1.0] and discounted["sample_ids"].tolist() == [0, 0]
        assert client.lend() == []


def test_user_trajectory_is_lent_until_result_is_durable(digits: Place, tmp_path: Path) -> None:
    flags = ("--model", "digits", "--engine", "embedded", "--engine-url", digits.engine.url)
    state = ("--tokenizer-path", str(digits.folder), "--state-dir", str(tmp_path))
    proxy = digits.processes.service("data_proxy", *flags, *state, "--visibility-timeout", "0.2")
    wait_ready(proxy)
    place = replace(digits, proxy=proxy)
    online = {"agent": AgentConfig(mode="online"), "consumer_batch_size": 1, "max_head_offpolicyness": 8}
    with InferenceClient(proxy.url, digits.key, model="digits") as client:

        def reward(value: float) -> None:
            session = client.start_session("a user", online=True)
            session.chat(ROWS[0]["messages"], max_tokens=8)
            session.reward(value)

        def taken(controller: RolloutController) -> float:
            return float(controller.take_prepared(None)[0].trajectory["rewards"])

        reward(1.0)
        for controller in controller_of(place, **online):
            assert taken(controller) == 1.0
        for controller in controller_of(place, **online):
            assert taken(controller) == 1.0  # of a process that ended before it had trained on it
            assert len(controller.spent_leases()) == 1
            reward(2.0)
            assert taken(controller) == 2.0  # not the first one again
            controller.acknowledge(controller.spent_leases())
            assert controller.spent_leases() == []
        assert client.lend(wait_s=1) == []


class Angry:
    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        raise LookupError("no tool of that name")


class Rewarding:
    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        return 1.0


def test_agent_failure_is_attributed_to_responsible_party(controller: RolloutController) -> None:
    with pytest.raises(RolloutsFailed, match="fault of the workflow: LookupError"):
        controller.rollout_batch(ROWS[:1], Angry())
    with pytest.raises(RolloutsFailed, match=r"fault of the workflow: .* no call of the model to be rewarded"):
        controller.rollout_batch(ROWS[:1], Rewarding())


class Guess:
    """An environment of gymnasium's interface: the number is right when its reverse was answered, three tries."""

    def __init__(self) -> None:
        self.tries, self.right, self.closed = 0, False, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        assert options is not None
        self.answer = options["answer"]
        return options["messages"], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.tries += 1
        self.right = action.strip() == self.answer
        return [{"role": "user", "content": self.answer[::-1]}], float(self.right), self.right, self.tries == 3, {}

    def close(self) -> None:
        self.closed = True


class Talker:
    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def act(self, observation: Any, model: ChatModel) -> Any:
        self.messages += observation
        answer = await model.chat(self.messages, max_tokens=8)
        self.messages.append(answer["choices"][0]["message"])
        return answer["choices"][0]["message"]["content"]


def test_agent_and_environment_make_a_workflow(controller: RolloutController) -> None:
    assert isinstance(Guess(), Environment)
    made: list[Guess] = []

    def environment() -> Guess:
        made.append(Guess())
        return made[-1]

    workflow = EnvironmentWorkflow(Talker, environment, discount=0.9, style="concat")
    trajectories = controller.rollout_batch(ROWS, workflow)
    ended = {each.answer: each for each in made}
    for data, trajectory in zip(ROWS, trajectories, strict=True):
        episode = ended[data["answer"]]
        assert episode.closed and (episode.right or episode.tries == 3)
        assert (float(trajectory["rewards"][-1]) > 0) == episode.right
        # The text of a response lacks its special tokens: the next prompt then does not continue it and begins a row of
        # its own, so the longest row may have fewer turns than the episode.
        longest = int(trajectory["turn_ids"].max()) + 1
        assert 1 <= longest <= episode.tries <= longest * len(trajectory["rewards"])


def test_gymnasium_environment_is_accepted() -> None:
    import gymnasium

    assert isinstance(gymnasium.make("CartPole-v1"), Environment)


@pytest.mark.parametrize(
    ("workflow", "kwargs", "message"),
    [
        (None, None, "no workflow was given"),
        (object(), None, "object is not a workflow"),
        ("areal.workflow.rlvr:RLVRWorkflo", None, 'did you mean "RLVRWorkflow"'),
        (RLVRWorkflow, {"reward": 1}, "RLVRWorkflow: missing a required argument|got an unexpected"),
        (Rewarding(), {"x": 1}, "made already"),
    ],
)
def test_invalid_workflow_is_explained(workflow: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(UsageFault, match=message):
        WorkflowResolver().resolve(workflow, kwargs)


@pytest.mark.parametrize("name", ["agent", "openai"])
def test_configured_agent_runs_without_workflow(name: str) -> None:
    agent = AgentConfig(agent_cls_path=f"{__name__}:Mathematician")
    controller = RolloutController(InferenceEngineConfig(**{name: agent}))  # type: ignore[arg-type]
    resolved: Any = controller._workflows.resolve(None)
    assert isinstance(resolved._agent, Mathematician)


def test_drop_incomplete_group_applies_to_any_workflow() -> None:
    given: tuple[Any, ...] = (WorkflowResolver(drop_incomplete_group=True), WorkflowResolver())
    whole, short = (each.resolve(Mathematician(), None, 2) for each in given)
    assert (whole._drop_incomplete_group, short._drop_incomplete_group) == (True, False)


def test_same_workflow_is_made_once() -> None:
    workflows = WorkflowResolver()
    first = workflows.resolve(Mathematician, {"turns": 2})
    assert workflows.resolve(Mathematician, {"turns": 2}) is first
    assert workflows.resolve(Mathematician, {"turns": 3}) is not first


@pytest.mark.parametrize(
    ("workflow", "kwargs", "message"),
    [
        (3, {}, "int is not a workflow"),
        (3, {"x": 1}, "int is not a workflow"),
        ("areal.workflow.vision_rlvr.VisionRLVRWorkflow", {"x": 1}, "VisionRLVRWorkflow: missing a required argument"),
        (
            RLVRWorkflow,
            {"reward_fn": f"{__name__}:NO_REWARD"},
            "a reward is a function, an object to call",
        ),
        (RLVRWorkflow, {"reward_fn": dict}, "a reward is a function, an object to call"),
        (RLVRWorkflow, {"reward_fn": f"{__name__}:no_reward"}, "no 'no_reward' there"),
        (RLVRWorkflow, {"reward_fn": "no_such_module:x"}, "there is no module no_such_module"),
    ],
)
def test_unrunnable_workflow_is_refused_before_first_episode(
    tokenizer: Any, workflow: Any, kwargs: dict[str, Any], message: str
) -> None:
    common = {"gconfig": GCONFIG, "tokenizer": tokenizer} if workflow is RLVRWorkflow else {}
    with pytest.raises(UsageFault) as caught:
        WorkflowResolver().resolve(workflow, {**common, **kwargs})
    assert message in str(caught.value)


def identity_ids(messages: Any, tokenizer: Any, thinking: bool) -> list[int]:
    return list(tokenizer.encode(f"<bos>{messages[0]['content']}="))


def as_messages(data: dict[str, Any]) -> list[dict[str, Any]]:
    return list(data["messages"])


def test_functions_of_a_workflow_may_be_names(controller: RolloutController, tokenizer: Any) -> None:
    kwargs = {
        "reward_fn": "tests.reward.rewards.only_some",
        "gconfig": GCONFIG,
        "tokenizer": tokenizer,
        "get_input_ids_fn": "tests.rollout.test_workflows.identity_ids",
        "data_extract_prompt_fn": "tests.rollout.test_workflows:as_messages",
    }
    batch = controller.rollout_batch(ROWS, "areal.workflow.rlvr.RLVRWorkflow", kwargs)
    for given, trajectory in zip(ROWS, batch, strict=True):
        prompt = identity_ids(given["messages"], tokenizer, False)
        assert trajectory["input_ids"][0, : len(prompt)].tolist() == prompt
        assert sampled(trajectory)  # perhaps the end token alone


def test_math_agent_retries_up_to_max_turns(digits: Place) -> None:
    agent = "areal.workflow.openai.math_agent.MathAgent"
    kwargs = {"max_turns": 3, "turn_discount": 0.5, "max_completion_tokens": 8, "feedback": "5678"}
    for controller in controller_of(digits, agent=AgentConfig(turn_discount=0.0)):
        (never,) = controller.rollout_batch(
            ROWS[:1], agent, {**kwargs, "reward_fn": "tests.reward.rewards:never_right"}
        )
        first = controller.rollout_batch(ROWS[:1], agent, {**kwargs, "reward_fn": "tests.reward.rewards:only_some"})
    assert never["original_rewards"].tolist() == [0.0, 0.0, 0.0]
    rewards = first[0]["original_rewards"].tolist()
    assert rewards[-1] in (0.0, 0.5 ** (len(rewards) - 1)) and not any(rewards[:-1])
    with pytest.raises(UsageFault, match="max_turns must be at least 1, not 0"):
        WorkflowResolver().resolve(agent, {"max_turns": 0})


class Responding:
    """A workflow with OpenAI's responses, and a chat, of one client."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        from areal.experimental.openai import ArealOpenAI

        client = ArealOpenAI(engine=engine)
        answer = await client.responses.create(input=data["messages"][0]["content"], max_output_tokens=8)
        assert answer.output_text
        chat = await client.chat.completions.create(messages=data["messages"], max_completion_tokens=8)
        client.set_reward(answer.id, 1.0)
        client.set_reward(chat.id, 0.5)
        return client.export_interactions()


def test_areal_client_response_is_a_rewarded_call(controller: RolloutController) -> None:
    (trajectory,) = controller.rollout_batch(ROWS[:1], Responding())
    assert trajectory["rewards"].tolist() == [1.0, 0.5]


class Branching(RolloutWorkflow):
    """Two conversations of one client, of two turns and of one. It closes the HTTP client that episodes share."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        import openai

        from areal.api import workflow_context
        from areal.experimental.openai import ArealOpenAI

        async with openai.AsyncOpenAI(api_key="k", http_client=await workflow_context.get_httpx_client()):
            await asyncio.sleep(0)
        client, calls = ArealOpenAI(engine=engine), list[Any]()
        messages = list(data["messages"])
        for _ in range(2):
            calls.append(await client.chat.completions.create(messages=messages, max_completion_tokens=8))
            messages += [calls[-1].choices[0].message, {"role": "user", "content": "12"}]
        other = [{"role": "user", "content": "34"}]
        calls.append(await client.chat.completions.create(messages=other, max_completion_tokens=8))
        for call in calls[1:]:
            client.set_reward(call.id, 1.0)
        found = client.export_interactions(style="concat")
        assert list(found) == [calls[1].id, calls[2].id]
        return found


def test_client_conversations_are_exported_by_last_call(controller: RolloutController) -> None:
    """Several at once: the client that one episode closes is the others' too."""
    found = controller.rollout_batch([*ROWS[:1]] * 4, Branching())
    assert len(found) == 4 and all((each["rewards"] == 1).sum() >= 2 for each in found)


class OwnHttp:
    """An agent with an HTTP client of its own."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, **_: Any) -> float:
        import openai

        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0) as client:
            await client.chat.completions.create(model="digits", messages=data["messages"], max_completion_tokens=4)
        return 1.0


def test_agents_of_a_driver_behind_a_proxy_reach_loopback(digits: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "intranet.example")
    monkeypatch.setenv("NO_PROXY", "")
    config = InferenceEngineConfig(request_retries=0)
    with RolloutController(config, gateway_addr=digits.proxy.url, admin_api_key=digits.key, model="digits") as behind:
        (trajectory,) = behind.rollout_batch(ROWS[:1], OwnHttp())
    assert trajectory["rewards"].tolist() == [1.0]
    assert os.environ["NO_PROXY"] == "intranet.example,127.0.0.1,localhost,::1"


# Groups of episodes of one prompt


class Engines:
    """Gives each member of a group an engine of its own: its number."""

    def for_group(self, size: int) -> list[int]:
        return list(range(size))


class Member(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        if engine in data.get("failing", ()):
            raise ConnectionError(f"member {engine}")
        return (
            None if engine in data.get("rejected", ()) else row([9, engine], [0, 1], [0.0, 0.0], [-1, 0], [-1, 0], 1.0)
        )


class Together(Member):
    """Samples groups of two itself."""

    def can_group(self, engine: Any, size: int) -> bool:
        return size == 2

    async def arun_group(self, engine: Any, data: dict[str, Any], size: int) -> list[RewardedResponse | Exception]:
        answers = [ModelResponse([70 + n], [5] * n, [-1.0] * n, [3] * n, "stop") for n in range(size)]
        given: list[RewardedResponse | Exception] = [RewardedResponse(each, 1.0) for each in answers]
        return [ConnectionError("first"), *given[1:]] if data.get("failing") else given


async def test_group_members_share_engines_of_one_group() -> None:
    group = await GroupedWorkflow(Member(), 3).arun_episode(Engines(), {"rejected": [1]})
    assert group is not None and group["input_ids"].tolist() == [[9, 0], [9, 2]]
    assert group["sample_ids"].tolist() == [0, 2]
    assert await GroupedWorkflow(Member(), 2).arun_episode(Engines(), {"rejected": [0, 1]}) is None


async def test_group_capable_workflow_samples_group_at_once() -> None:
    together = await GroupedWorkflow(Together(), 2).arun_episode(Engines(), {})
    assert together is not None and together["input_ids"].tolist() == [[70, 0], [71, 5]]
    apart = await GroupedWorkflow(Together(), 3).arun_episode(Engines(), {})
    assert apart is not None and apart["input_ids"].tolist() == [[9, 0], [9, 1], [9, 2]]


@pytest.mark.parametrize("workflow", [Member(), Together()])
async def test_failed_member_fails_group_or_is_dropped(workflow: RolloutWorkflow) -> None:
    data = {"failing": [0]}
    with pytest.raises(ConnectionError):
        await GroupedWorkflow(workflow, 2).arun_episode(Engines(), data)
    short = await GroupedWorkflow(workflow, 2, drop_incomplete_group=False).arun_episode(Engines(), data)
    assert short is not None and short["sample_ids"].tolist() == [1]


MALFORMED: dict[str, tuple[Any, str]] = {
    "short column": (lambda rows: rows | {"logprobs": rows["logprobs"][:, :-1]}, r"logprobs is \[1, 2\], input_ids"),
    "one number": (lambda rows: rows | {"rewards": torch.tensor(1.0)}, r"rewards must be one a row: \[1\], not \[\]"),
    "no rows": (lambda rows: {name: column[0] for name, column in rows.items()}, r"must be \[rows, tokens\]"),
    "lists": (lambda rows: {name: column.tolist() for name, column in rows.items()}, "must be a tensor, not list"),
    "no dict": (lambda rows: 1.0, "gives a dict of tensors or None, not float"),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_rows_of_a_workflow_are_never_padded_or_rejected(
    controller: RolloutController, kind: str, size: int
) -> None:
    malformed, message = MALFORMED[kind]

    class Malformed(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            return malformed(row([5, 6, 7], [0, 1, 1], [0.0, -1.0, -1.0], [-1, 0, 0], [-1, 0, 0], 1.0))

    with pytest.raises(RolloutsFailed, match=message):
        controller.rollout_batch(ROWS[:1], Malformed(), group_size=size)


async def test_dropped_samples_are_counted_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    group = GroupedWorkflow(Member(), 3, drop_incomplete_group=False)
    for _ in range(5):
        await group.arun_episode(Engines(), {"failing": [1]})
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [1, 2, 4]
    assert "member 1" in caplog.text


@pytest.mark.parametrize(
    "setting",
    [
        {"service": "tau"},
        {"gateway_addr": "http://127.0.0.1:1"},
        {"admin_api_key_file": "k"},
        {"inference": "default"},
        {"model": "tiny"},
        {"num_pairs": 2},
        {"setup_timeout": 1.0},
        {"health_poll_interval": 1.0},
        {"drain_timeout": 1.0},
        {"session_timeout": 1.0},
        {"request_timeout": 1.0},
        {"log_level": "debug"},
        {"env": {"A": "1"}},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_agent_service_settings_are_refused_for_inline_agents(setting: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=f"agent.{next(iter(setting))} applies to agent services only: agents of a rollout"
    ):
        InferenceEngineConfig(agent=AgentConfig(**setting))
