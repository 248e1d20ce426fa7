"""A driver of an agent in an environment of gymnasium's."""

import sys

import gymnasium

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.workflow.environment import EnvironmentWorkflow


class Reversing(gymnasium.Env):
    """The observation is a number; the right action is the same backwards. Two attempts."""

    observation_space = gymnasium.spaces.Text(4, charset="0123456789")
    action_space = gymnasium.spaces.Text(16)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.asked, self.left = options["messages"][-1]["content"][:4], 2
        return self.asked, {}

    def step(self, action):
        self.left -= 1
        right = action.strip() == self.asked[::-1]
        return self.asked, float(right), right, self.left == 0, {}


class Asking:
    """Keeps the conversation of its episode."""

    def __init__(self):
        self.messages = []

    async def act(self, observation, model):
        self.messages.append({"role": "user", "content": observation})
        answer = await model.chat(self.messages, max_tokens=8, temperature=1.0)
        self.messages.append(answer["choices"][0]["message"])
        return self.messages[-1]["content"] or ""


def main(args):
    config, _ = load_expr_config(args, GRPOConfig)
    rows = get_custom_dataset(split="train", dataset_config=config.train_dataset)
    with PPOTrainer(config, train_dataset=rows) as trainer:
        trainer.train(
            workflow=EnvironmentWorkflow, workflow_kwargs={"agent": Asking, "environment": Reversing, "max_steps": 4}
        )


if __name__ == "__main__":
    main(sys.argv[1:])
