"""A replica that dies under running episodes costs them an attempt, and the trainer nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.api.cli_args import InferenceEngineConfig
from areal.api.io_struct import ModelRequest
from areal.client import InferenceClient, RolloutController, ServiceError, UnknownName
from areal.rollout.engine import EpisodeEngine
from areal.rollout.tensors import check_rows
from tests.client.conftest import tokenizer
from tests.rollout.test_controller import Sampled, rows
from tests.rollout.test_workflows import Mathematician
from tests.services.processes import Process, Processes, engine_calls, release, script, wait_until

__all__ = ["tokenizer"]


class Service:
    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.processes = Processes(folder)
        self.engine = self.processes.engine(tokenizer)
        self.proxies: list[Process] = []
        for number in range(2):
            state = ("--state-dir", str(folder / "state"), "--adopt-after", "0.2")
            environment = {"AREAL_RUN_UID": f"replica-{number}"}
            flags = ("--model", "tiny", "--engine", "embedded", "--engine-url", self.engine.url)
            proxy = self.processes.service(
                "data_proxy", *flags, "--tokenizer-path", str(tokenizer), *state, env=environment
            )
            self.proxies.append(proxy)
        router = self.processes.router()
        self.gateway = self.processes.gateway(router)
        self.processes.register(router, *self.proxies, expected=2)
        wait_until(lambda: self.gateway.call("GET", "/v1/models", key=self.processes.key).json()["models"])

    def controller(self) -> RolloutController:
        config = InferenceEngineConfig(
            consumer_batch_size=6, max_concurrent_rollouts=6, request_timeout=60, setup_timeout=20, request_retries=3
        )
        address, key = self.gateway.url, self.processes.key
        return RolloutController(config, gateway_addr=address, admin_api_key=key, model="tiny")


@pytest.fixture
def service(tmp_path: Path, tokenizer: Path) -> Iterator[Service]:
    service = Service(tmp_path, tokenizer)
    yield service
    service.processes.stop()


def test_replica_killed_under_completions_loses_no_batch(service: Service) -> None:
    script(service.engine, gate=1)
    with service.controller() as controller:
        for data in rows(*range(6)):
            controller.submit(data, Sampled())
        engine_calls(service.engine, until="any", count=6)
        service.proxies[0].kill()
        release(service.engine)
        taken = controller.take(6)
        assert sorted(each.data["n"] for each in taken) == list(range(6))
        assert controller.export_stats()["failed"] == 0


@pytest.mark.extended
def test_replica_killed_under_agents_loses_no_batch(service: Service) -> None:
    script(service.engine, gate=1)
    with service.controller() as controller:
        data = {"messages": [{"role": "user", "content": "Hello"}]}
        for number in range(6):
            controller.submit({**data, "n": number}, Mathematician())
        engine_calls(service.engine, until="any", count=6)
        service.proxies[0].kill()
        release(service.engine)
        script(service.engine, gate=None)
        taken = controller.take(6)
        assert sorted(each.data["n"] for each in taken) == list(range(6))
        assert all(each.trajectory["rewards"].tolist() == [1.0] for each in taken)


@pytest.mark.extended
def test_control_errors_name_failed_worker(service: Service) -> None:
    with InferenceClient(service.gateway.url, service.processes.key, model="tiny", timeout_s=30) as client:
        workers = [each["worker_id"] for each in client.workers.list()]
        client.workers.drain(workers[0])
        states = {each["worker_id"]: each["state"] for each in client.workers.list()}
        assert states == {workers[0]: "draining", workers[1]: "ready"}
        client.workers.undrain(workers[0])
        assert client.workers.get_version() == client.workers.get_version(workers[0]) == 0
        service.proxies[1].kill()
        with pytest.raises(ServiceError, match=f"failed on 1 of 2 workers: {workers[1]}"):
            client.workers.get_version()
        with pytest.raises(UnknownName):
            client.workers.pause("absent")
        assert client.chat([{"role": "user", "content": "Hello"}], store=False)["choices"]


def test_manually_registered_models_can_be_added_and_removed(service: Service) -> None:
    with InferenceClient(service.gateway.url, service.processes.key, timeout_s=30) as client:
        client.workers.deregister_model("tiny")
        wait_until(lambda: client.models() == [])
        client.workers.register_model("tiny", [proxy.url for proxy in service.proxies])
        wait_until(lambda: client.models() == ["tiny"])


def test_temporarily_missing_model_loses_no_prompt(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    """As where a service is suspended and resumed: its gateway is there before it knows the model again."""
    with service.controller() as controller, InferenceClient(service.gateway.url, service.processes.key) as client:
        client.workers.deregister_model("tiny")
        wait_until(lambda: client.models() == [])
        for data in rows(*range(6)):
            controller.submit(data, Sampled())
        wait_until(lambda: sum("attempt 1 failed" in record.message for record in caplog.records) == 6)
        client.workers.register_model("tiny", [proxy.url for proxy in service.proxies])
        assert sorted(each.data["n"] for each in controller.take(6)) == list(range(6))
        assert controller.export_stats()["failed"] == 0


class OlderService:
    """Answers as before ``token_logprobs`` was there."""

    async def complete(self, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
        return [{"index": 0, "text": "7", "finish_reason": "stop", "token_ids": [7], "versions": [0]}]


async def test_older_service_is_named_with_remedy() -> None:
    older: Any = OlderService()
    engine = EpisodeEngine(older, older, "task", lambda: 0, timeout_s=1.0)
    with pytest.raises(ServiceError, match=r"without 'token_logprobs': it is of another release .* restart it"):
        await engine.agenerate(ModelRequest(input_ids=[1]))


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -1e39])
def test_unrepresentable_rewards_fail_their_episode(reward: float) -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    rows = {"input_ids": ids, "attention_mask": ids.bool(), "rewards": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    check_rows(rows)
    rows["rewards"][1] = reward
    with pytest.raises(ValueError, match="rewards must be finite, within the range of float32"):
        check_rows(rows)


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_non_finite_logprob_fails_its_episode(logprob: float) -> None:
    ids, mask = torch.ones(1, 3, dtype=torch.int64), torch.tensor([[0, 1, 1]])
    rows = {"input_ids": ids, "attention_mask": ids.bool(), "loss_mask": mask, "logprobs": torch.zeros(1, 3)}
    rows["logprobs"][0, 0] = logprob  # of the prompt
    check_rows(rows)
    rows["logprobs"][0, 1] = logprob
    with pytest.raises(ValueError, match="logprobs of sampled tokens must be finite, not "):
        check_rows(rows)


@pytest.mark.parametrize(
    ("attention", "loss", "message"),
    [
        ([0, 1, 1], [0, 0, 1], "rows are padded on the right"),  # on the left
        ([1, 0, 1], [0, 0, 1], "rows are padded on the right"),
        ([0, 0, 0], [0, 0, 0], "rows are padded on the right"),
        ([1, 1, 0], [0, 1, 1], "is 1 at padding"),
        ([1, 1, 1], [1, 1, 1], "is 1 at a row's first token"),  # the prompt is not masked
    ],
)
def test_masks_that_would_train_other_tokens_fail_their_episode(
    attention: list[int], loss: list[int], message: str
) -> None:
    ids, whole = torch.ones(2, 3, dtype=torch.int64), [1, 1, 1]
    rows = {"input_ids": ids, "attention_mask": torch.tensor([whole, [1, 1, 0]]).bool()}
    check_rows(rows | {"loss_mask": torch.tensor([[0, 1, 1], [0, 0, 0]])})
    masks = {"attention_mask": torch.tensor([whole, attention]), "loss_mask": torch.tensor([[0, 0, 1], loss])}
    with pytest.raises(ValueError, match=message):
        check_rows(rows | masks)
