"""The garbage collector of a process that serves: what its modules hold lives as long as it does, and what a request
leaves behind is freed by its reference counts but for the rare cycle. So it is looked for rarely: at the usual
thresholds the looking is a tenth of what a short request costs."""

from __future__ import annotations

import gc

_YOUNG = 50_000  # objects made and not yet freed: some tens of megabytes at most
_OFTEN, _SELDOM = 20, 50


def collect_rarely() -> None:
    """Once everything is imported and made that lasts."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _OFTEN, _SELDOM)
