"""Reinforcement and supervised learning as pure functions of tensors.

All tensors are aligned by token: column t is about token t. ``logprobs[b, t]`` is the log probability of token t given
the tokens before it, ``loss_mask[b, t]`` is true where the policy sampled token t, ``values[b, t]`` is the value of the
state before token t. The first column is never trained on. Callers therefore never shift columns.
"""
