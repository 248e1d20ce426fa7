"""What every test may rely on, wherever the suite is started from."""

from __future__ import annotations

import signal

from hypothesis import settings

# A script's `pytest &` begins with these ignored, and so would every command that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# `--hypothesis-profile=default`: a busy machine is no failure of a property.
settings.register_profile("default", settings.get_profile("default"), deadline=None)
