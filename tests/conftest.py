"""What every test may rely on, wherever the suite is started from."""

from __future__ import annotations

import signal

# A script's `pytest &` begins with these ignored, and so would every command that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
