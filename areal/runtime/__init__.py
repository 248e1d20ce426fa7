"""Processes: shims, identity, signals, leases, probes, logs, and the backends that use them.

Everything here imports the standard library only (a helper process queries the GPUs), so that reading commands stay
light. Nothing here makes decisions: reconcilers do.
"""
