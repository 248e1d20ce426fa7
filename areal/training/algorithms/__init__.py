"""Reinforcement and supervised learning as pure functions of tensors.

One convention everywhere, "token aligned": column t of every tensor speaks of token t. ``logprobs[b, t]`` is the log
probability of token t after the tokens before it, ``loss_mask[b, t]`` says whether token t was sampled by the policy,
``values[b, t]`` is the value of the state in which token t was chosen. The first column is never trained on. Nothing
has to be shifted by whoever uses these functions, so nothing can be shifted differently from its neighbor.
"""
