"""A driver whose workflow talks by OpenAI's client, rewards its calls and exports them."""

import asyncio
import sys
from dataclasses import dataclass

from areal import PPOTrainer
from areal.api.cli_args import PPOConfig, load_expr_config
from areal.api.workflow_api import RolloutWorkflow
from areal.dataset import get_custom_dataset
from areal.experimental.openai import ArealOpenAI
from areal.utils.hf_utils import load_hf_tokenizer


@dataclass
class AgentConfig(PPOConfig):
    n_trajs: int = 2
    max_turns: int = 2
    export_style: str = "concat"


class MultiTurn(RolloutWorkflow):
    def __init__(self, gconfig, tokenizer, n_trajs, max_turns, export_style):
        self.gconfig, self.tokenizer = gconfig, load_hf_tokenizer(tokenizer)
        self.n_trajs, self.max_turns, self.export_style = n_trajs, max_turns, export_style

    async def talk(self, client, data):
        messages = list(data["messages"])
        for _ in range(self.max_turns):
            completion = await client.chat.completions.create(
                messages=messages, max_completion_tokens=6, temperature=self.gconfig.temperature, store=True
            )
            messages += [completion.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "0"}]
        client.set_reward(completion.id, float(len(completion.choices[0].message.content or "") % 2))

    async def arun_episode(self, engine, data):
        clients = [ArealOpenAI(engine=engine, tokenizer=self.tokenizer) for _ in range(self.n_trajs)]
        await asyncio.gather(*[self.talk(client, data) for client in clients])
        interactions = {}
        for client in clients:
            client.apply_reward_discount(turn_discount=0.9)
            interactions.update(client.export_interactions(style=self.export_style))
        return interactions


def main(args):
    config, _ = load_expr_config(args, AgentConfig)
    rows = get_custom_dataset(split="train", dataset_config=config.train_dataset)
    kwargs = {name: getattr(config, name) for name in ("gconfig", "n_trajs", "max_turns", "export_style")}
    with PPOTrainer(config, train_dataset=rows) as trainer:
        trainer.train(workflow="own_client.MultiTurn", workflow_kwargs={**kwargs, "tokenizer": config.tokenizer_path})


if __name__ == "__main__":
    main(sys.argv[1:])
