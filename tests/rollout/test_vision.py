"""Episodes of rows with images: what is sampled, recorded as rows, and refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.client import CallerError, InferenceClient, RolloutController
from areal.dataset.images import images_key
from areal.dataset.vision import load_processor
from areal.errors import UsageFault
from areal.rollout.dump import episodes_of
from areal.workflow.multi_turn import MultiTurnWorkflow
from areal.workflow.rlvr import RLVRWorkflow
from areal.workflow.vision_rlvr import VisionRLVRWorkflow
from tests.services.processes import Process, Processes, wait_ready
from tests.vision import MODEL, drawing, in_base64, plain_logprobs, question

RED, BLUE = drawing("red"), drawing("blue")
SHORT = GenerationHyperparameters(max_new_tokens=3, temperature=1.0)
ROW = {"messages": question(), "images": [RED]}


async def longest(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **row: Any) -> float:
    return float(len(completion_ids))


def workflow() -> VisionRLVRWorkflow:
    return VisionRLVRWorkflow(longest, SHORT, str(MODEL), str(MODEL))


class Recorded:
    """An engine that keeps requests and answers with the end token."""

    def __init__(self) -> None:
        self.requests: list[ModelRequest] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        key = images_key(request.image_data or [])
        return ModelResponse(request.input_ids, [2], [-1.0], [0], "stop", images=key)


async def test_request_contains_placeholders_and_row_images() -> None:
    engine = Recorded()
    rows = await workflow().arun_episode(engine, dict(ROW))  # type: ignore[arg-type]
    (request,) = engine.requests
    assert request.input_ids == load_processor(str(MODEL)).prompt(question(), [RED])
    assert request.image_data == [RED]
    assert rows is not None and rows["images"].tolist() == [images_key([RED])]


@pytest.mark.parametrize("image", ["/gone.png", "https://example.org/a.png", RED[:50]])
async def test_invalid_image_in_row_is_a_caller_fault(image: Any) -> None:
    with pytest.raises(CallerError, match=r"images\[1\]"):
        await workflow().arun_episode(Recorded(), {**ROW, "images": [RED, image]})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [RLVRWorkflow, MultiTurnWorkflow])
async def test_image_row_is_refused_by_text_workflows(kind: type) -> None:
    made = kind(longest, SHORT, str(MODEL))
    with pytest.raises(UsageFault, match="the row has images, and this workflow samples from text"):
        await made.arun_episode(Recorded(), dict(ROW))


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, str]]:
    """A data proxy before an engine with the example's model, and its key."""
    folder = tmp_path_factory.mktemp("sees")
    processes = Processes(folder)
    try:
        engine = processes.service("engines.embedded", "--model-path", str(MODEL))
        wait_ready(engine)
        flags = ("--model", "sees", "--engine", "embedded", "--engine-url", engine.url)
        proxy = processes.service(
            "data_proxy", *flags, "--tokenizer-path", str(MODEL), "--state-dir", str(folder / "state")
        )
        wait_ready(proxy)
        yield proxy, processes.key
    finally:
        processes.stop()


@pytest.mark.extended
def test_image_group_logprobs_match_transformers(proxy: tuple[Process, str]) -> None:
    config = InferenceEngineConfig(consumer_batch_size=2, request_timeout=60.0, setup_timeout=60.0)
    controller = RolloutController(config, gateway_addr=proxy[0].url, admin_api_key=proxy[1], model="sees")
    controller.initialize()
    try:
        rows = [dict(ROW), {**ROW, "images": [BLUE]}]
        rollouts = controller.run_batch(rows, workflow(), group_size=3)
    finally:
        controller.destroy()
    for rollout, image in zip(sorted(rollouts, key=lambda each: each.number), (RED, BLUE), strict=True):
        found = rollout.trajectory
        assert found["images"].tolist() == [images_key([image])] * 3
        for ids, mask, logprobs in zip(found["input_ids"], found["loss_mask"], found["logprobs"], strict=True):
            where = mask[1:].bool()
            plain = plain_logprobs(ids.tolist(), [image]).gather(1, ids[1:, None])[:, 0]
            torch.testing.assert_close(logprobs[1:][where], plain[where], atol=1e-4, rtol=0)
        assert episodes_of(rollout)[0].example["images"] == [f"image of {len(image)} bytes"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"store": True}, "its call is not recorded: send store: false"),
        ({"prompt": [[1, 4], [1, 4]]}, "image_data goes with one prompt of token ids"),
        ({"prompt": "What color"}, "image_data goes with one prompt of token ids"),
        ({"image_data": [in_base64(RED[:50])]}, "images[0] cannot be decoded"),
        ({"image_data": [in_base64(RED)] * 2}, "stands for 8 tokens 4, and the prompt has 4"),
        ({"image_data": [in_base64(RED)] * 17}, "image_data may hold at most 16 strings"),
        ({"prompt_logprobs": 0}, "its prompt has no log-probabilities"),
    ],
)
def test_unsupported_image_call_is_400_naming_field(
    proxy: tuple[Process, str], fields: dict[str, Any], message: str
) -> None:
    prompt = load_processor(str(MODEL)).prompt(question(), [RED])
    given = {"prompt": prompt, "image_data": [in_base64(RED)], "store": False, "max_tokens": 2, **fields}
    with InferenceClient(proxy[0].url, proxy[1], model="sees") as client, pytest.raises(CallerError) as refused:
        client.complete(**given)
    assert message in refused.value.message and "image_data" in refused.value.message
