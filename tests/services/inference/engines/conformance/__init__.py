"""One suite that every token engine runs: the same checks, the same models, only the process behind them differs.

``embedded`` is the real one. ``vllm-standin`` and ``sglang-standin`` speak those engines' documented routes and really
compute, so that the same checks mean something. ``vllm`` and ``sglang`` are the real ones, behind markers: CONTRIBUTING
says how they are run.
"""
