"""The embedded engine: one process that serves one causal language model with PyTorch alone.

    __main__ -> app -> engine -> scheduler            the next step (pure)
                              -> runner -> decoder     the model, by rows of a KV cache
                              -> sampler               logits to tokens and logprobs

One thread owns the model and takes steps; the HTTP loop hands it requests and reads the tokens that it appended.
Requests join and leave, weights are swapped and the engine pauses only between two steps. torch is imported only after
the model folder was found complete.
"""
