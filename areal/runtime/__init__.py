"""Processes: shims, identity, signals, leases, probes, logs, and the backends that use them.

Everything here imports the standard library only (GPUs are asked in a helper process), so that reading commands
stay light. Nothing here decides: reconcilers do.
"""
