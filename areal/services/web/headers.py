"""The header names of this house, and of the conventions it follows."""

from __future__ import annotations

REQUEST_ID = "x-request-id"
ANTHROPIC_REQUEST_ID = "request-id"  # where clients of their API look for it
OVERHEAD = "x-areal-overhead-us"  # our own time in a proxied reply, in microseconds; the engine's is left out
IGNORED = "x-areal-ignored"  # request fields that the API does not know
ATTEMPTS = "x-areal-attempts"  # how many workers were tried
EXPORT_ID = "x-areal-export-id"  # beside an export's columns as .npz
FINAL = "x-areal-final"  # data proxy to relay: another worker would be told the same, so the caller is told
PROGRESS_TIMEOUT = "x-areal-progress-timeout"  # relay to data proxy: seconds without progress that are too many
