"""A driver with a configuration, a workflow and a reward of its own: int32 tensors, no versions, its own numbers."""

import asyncio
import sys
import uuid
from dataclasses import dataclass, field

import torch

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.api.io_struct import ModelRequest
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow
from areal.dataset import get_custom_dataset
from areal.infra import workflow_context
from areal.utils import logging, seeding, stats_tracker
from areal.utils.data import concat_padded_tensors
from areal.utils.hf_utils import load_hf_tokenizer
from areal.utils.stats_logger import StatsLogger

logger = logging.getLogger("own workflow")


@dataclass
class OwnConfig(GRPOConfig):
    n_trajs: int = field(default=1, metadata={"help": "samples of an episode"})
    weights: dict[str, float] = field(default_factory=dict)


def weighted_reward(prompt, completions, prompt_ids, completion_ids, answer, weights, **kwargs):
    """Two rewards, weighted: how many characters are right, and whether the length is."""
    right = answer.rpartition("####")[2].strip()
    same = sum(a == b for a, b in zip(completions, right, strict=False)) / len(right)
    return weights["right"] * same + weights["length"] * float(len(completions) == len(right))


class OwnWorkflow(RolloutWorkflow):
    def __init__(self, config, tokenizer, dump_dir):
        self.config, self.tokenizer, self.dump_dir = config, tokenizer, dump_dir
        self.gconfig = config.gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)
        self.reward_fn = AsyncRewardWrapper(weighted_reward)

    async def arun_episode(self, engine, data):
        asked = self.tokenizer.apply_chat_template(
            data["messages"], tokenize=True, add_generation_prompt=True, enable_thinking=False, return_dict=False
        )
        req = ModelRequest(rid=uuid.uuid4().hex, input_ids=list(asked), gconfig=self.gconfig, tokenizer=self.tokenizer)
        answers = await asyncio.gather(*[engine.agenerate(req) for _ in range(self.config.n_trajs)])
        rows = []
        for answer in answers:
            text = self.tokenizer.decode(answer.output_tokens, skip_special_tokens=True)
            reward = await self.reward_fn(
                "", text, answer.input_tokens, answer.output_tokens, weights=self.config.weights, **data
            )
            with stats_tracker.get(workflow_context.stat_scope()).scope("own"):
                stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward)
            seq = answer.input_tokens + answer.output_tokens
            row = {
                "input_ids": torch.tensor(seq, dtype=torch.int32),
                "loss_mask": torch.tensor([0] * answer.input_len + [1] * answer.output_len, dtype=torch.int32),
                "logprobs": torch.tensor([0.0] * answer.input_len + answer.output_logprobs, dtype=torch.float32),
                "attention_mask": torch.ones(len(seq), dtype=torch.bool),
                "rewards": torch.tensor(float(reward), dtype=torch.float32),
            }
            rows.append({name: column.unsqueeze(0) for name, column in row.items()})
        return concat_padded_tensors(rows)


def main(args):
    config, _ = load_expr_config(args, OwnConfig)
    seeding.set_random_seed(config.seed, "trainer0")
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train_dataset = get_custom_dataset(split="train", dataset_config=config.train_dataset, tokenizer=tokenizer)
    valid_dataset = get_custom_dataset(split="test", dataset_config=config.valid_dataset, tokenizer=tokenizer)
    dump_dir = f"{StatsLogger.get_log_path(config.stats_logger)}/generated"
    logger.info("its own files go to %s", dump_dir)
    with PPOTrainer(config, train_dataset, valid_dataset) as trainer:
        workflow = OwnWorkflow(config, tokenizer, dump_dir)
        trainer.train(
            workflow=workflow, eval_workflow=workflow, dynamic_filter_fn=lambda rows: len(rows["rewards"]) > 1
        )


if __name__ == "__main__":
    main(sys.argv[1:])
