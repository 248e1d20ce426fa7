"""How a call fails before its answer is whole. A deadline is TimeoutError, as everywhere."""

from __future__ import annotations


class CallFailed(Exception):
    """The other side gave no whole answer."""


class NotConnected(CallFailed):
    """No connection came about: the other side has not seen the call."""


class Lost(CallFailed):
    """The connection ended, or spoke no HTTP, before the answer's end."""
