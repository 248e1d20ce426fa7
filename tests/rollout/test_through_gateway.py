"""The SDK as users have it: through a gateway with two replicas, and the examples of docs/sdk.md as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.client import InferenceClient, RolloutController
from areal.workflow.rlvr import RLVRWorkflow
from tests.reward.rewards import reverse_reward
from tests.rollout.test_workflows import ROWS, Mathematician
from tests.services.inference.engines.embedded.process import EXAMPLE
from tests.services.processes import REPOSITORY, Process, Processes, wait_ready, wait_until

SDK = REPOSITORY / "docs" / "sdk.md"
NOTEBOOKS = REPOSITORY / "docs" / "notebooks.md"
PAGE = re.findall(r"^```python\n(.*?)^```", SDK.read_text(encoding="utf-8"), re.M | re.S)
BLOCKS = [block for block in PAGE if "Agent" not in block.partition("from areal.client import ")[2].partition("\n")[0]]


@dataclass(frozen=True)
class Service:
    gateway: Process
    key: str
    folder: Path


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    processes = Processes(folder)
    try:
        engines = [processes.service("engines.embedded", "--model-path", str(EXAMPLE)) for _ in range(2)]
        proxies = []
        for number, engine in enumerate(engines):
            wait_ready(engine)
            flags = ("--model", "reverse", "--engine", "embedded", "--engine-url", engine.url)
            state = ("--tokenizer-path", str(EXAMPLE), "--state-dir", str(folder / "state"))
            environment = {"AREAL_RUN_UID": f"replica-{number}"}
            proxies.append(processes.service("data_proxy", *flags, *state, env=environment))
        router = processes.router()
        gateway = processes.gateway(router)
        processes.register(router, *proxies, model="reverse", expected=2)
        wait_until(lambda: gateway.call("GET", "/v1/models", key=processes.key).json()["models"], what="published")
        yield Service(gateway, processes.key, folder)
    finally:
        processes.stop()


def controller(service: Service, **fields: object) -> RolloutController:
    given = {"consumer_batch_size": 2, "max_concurrent_rollouts": 4, "request_timeout": 60.0, "setup_timeout": 60.0}
    config = InferenceEngineConfig(**(given | fields))  # type: ignore[arg-type]
    return RolloutController(config, gateway_addr=service.gateway.url, admin_api_key=service.key, model="reverse")


def kwargs(service: Service) -> dict[str, object]:
    gconfig = GenerationHyperparameters(max_new_tokens=8)
    return {"reward_fn": reverse_reward, "gconfig": gconfig, "tokenizer": str(EXAMPLE)}


def test_batches_agents_and_versions_through_the_gateway(service: Service) -> None:
    with controller(service, min_required_servers=2) as rollout:
        batch = rollout.prepare_batch(ROWS, RLVRWorkflow, kwargs(service), group_size=2)
        assert [len(group["rewards"]) for group in batch] == [2, 2]
        assert [group["rewards"].tolist() for group in rollout.rollout_batch(ROWS, Mathematician(), group_size=2)] == [
            [1.0, 1.0],
            [1.0, 1.0],
        ]
        assert rollout.chat_completion(ROWS[0]["messages"], max_tokens=8)["object"] == "chat.completion"


def test_unbounded_answers_are_limited_by_context(service: Service) -> None:
    unbounded = {**kwargs(service), "gconfig": GenerationHyperparameters()}
    with controller(service) as rollout:
        assert len(rollout.rollout_batch(ROWS, RLVRWorkflow, unbounded)) == 2


def test_episodes_survive_pause_and_carry_versions(service: Service) -> None:
    with controller(service, max_head_offpolicyness=4) as rollout:
        rollout.pause_generation()
        for row in ROWS * 2:
            rollout.submit(row, RLVRWorkflow, kwargs(service))
        rollout.set_version(1)
        with InferenceClient(service.gateway.url, service.key) as client:
            client.workers.set_version(1)
            assert client.workers.get_version() == 1
        rollout.continue_generation()
        versions = {int(v) for each in rollout.wait(4) for v in each["versions"][each["loss_mask"].bool()]}
    assert versions == {1}


def test_sync_client_from_several_threads(service: Service) -> None:
    with InferenceClient(service.gateway.url, service.key, model="reverse") as client:
        found: list[float] = []

        def episode(number: int) -> None:
            session = client.start_session(f"thread-{number}")
            session.chat(ROWS[0]["messages"], max_tokens=8)
            session.reward(float(number))
            found.append(float(session.export().columns["rewards"][0]))

        threads = [threading.Thread(target=episode, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.extended
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_page_example_runs_as_printed(service: Service, tmp_path: Path, number: int) -> None:
    script = tmp_path / f"example_{number}.py"
    script.write_text(BLOCKS[number].replace("http://127.0.0.1:8080", service.gateway.url), encoding="utf-8")
    ran = run_example(service, tmp_path, str(script))
    assert "Error" not in ran.stderr and "never" not in ran.stderr, ran.stderr


@pytest.mark.extended
def test_notebook_cells_run_without_file(service: Service, tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", NOTEBOOKS.read_text(encoding="utf-8"), re.M | re.S)
    ran = run_example(service, tmp_path, "-", typed=block.replace("http://127.0.0.1:8080", service.gateway.url))
    assert re.fullmatch(r"tensor\(\[([01]\., ){3}[01]\.\]\)", ran.stdout.strip()), ran.stderr
    assert "right is defined in a notebook or an interactive session" in ran.stderr


def run_example(
    service: Service, tmp_path: Path, program: str, typed: str | None = None
) -> subprocess.CompletedProcess[str]:
    credentials = tmp_path / ".areal" / "credentials"
    credentials.mkdir(parents=True)
    (credentials / "default").write_text(service.key, encoding="ascii")
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, program]
    ran = subprocess.run(
        argv, env=environment, cwd=REPOSITORY, input=typed, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    return ran
