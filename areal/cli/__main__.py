"""``python -m areal.cli``."""

import sys

from areal.cli.main import main

sys.exit(main())
