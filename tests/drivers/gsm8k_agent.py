"""A driver whose workflow is an agent of OpenAI's client."""

import os
import sys

from openai import AsyncOpenAI

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.api.reward_api import AsyncRewardWrapper
from areal.dataset import get_custom_dataset
from areal.utils.hf_utils import load_hf_tokenizer


def last_number_reward(completions, answer):
    return float(completions.strip() == answer.rpartition("####")[2].strip())


class MathAgent:
    def __init__(self, **kwargs):
        self.kwargs = kwargs.copy()

    async def run(self, data, **extra_kwargs):
        http_client = extra_kwargs.get("http_client")
        base_url = extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL")
        api_key = extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY")
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
        comp = await client.chat.completions.create(messages=data["messages"], model="default", **self.kwargs)
        reward_fn = AsyncRewardWrapper(last_number_reward)
        return await reward_fn(completions=comp.choices[0].message.content, answer=data["answer"])


def main(args):
    config, _ = load_expr_config(args, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train_dataset = get_custom_dataset(split="train", dataset_config=config.train_dataset, tokenizer=tokenizer)

    with PPOTrainer(config, train_dataset=train_dataset, valid_dataset=None) as trainer:
        trainer.train(
            workflow=MathAgent,
            workflow_kwargs={"temperature": config.gconfig.temperature, "max_completion_tokens": 8},
        )


if __name__ == "__main__":
    main(sys.argv[1:])
