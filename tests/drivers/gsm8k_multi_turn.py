"""A driver whose workflow tries again until it is right."""

import sys

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.reward.gsm8k import gsm8k_reward_fn
from areal.utils.hf_utils import load_hf_tokenizer
from areal.workflow.multi_turn import MultiTurnWorkflow


def main(args):
    config, _ = load_expr_config(args, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train_dataset = get_custom_dataset(split="train", dataset_config=config.train_dataset, tokenizer=tokenizer)
    workflow = MultiTurnWorkflow(
        reward_fn=gsm8k_reward_fn,
        gconfig=config.gconfig,
        tokenizer=tokenizer,
        max_turns=3,
        turn_discount=0.9,
        feedback="0",
    )
    with PPOTrainer(config, train_dataset=train_dataset, valid_dataset=None) as trainer:
        trainer.train(workflow=workflow)


if __name__ == "__main__":
    main(sys.argv[1:])
