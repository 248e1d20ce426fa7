"""The embedded engine: one process that serves one causal language model with PyTorch alone.

    __main__ -> app -> engine -> scheduler            the next step (pure)
                              -> runner -> decoder     the model, by rows of a KV cache
                              -> sampler               logits to tokens and logprobs

One thread owns the model and takes steps; the HTTP loop only hands it requests and reads what it appended. Between two
steps, and only there, requests join and leave, weights are swapped and the engine pauses. Nothing here imports torch
until a folder was found to hold a whole model.
"""
