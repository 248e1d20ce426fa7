"""``python -I -S __main__.py RUN_DIR GATE_FD ACK_FD [HELD_FD...]``: wait for the "go", then supervise.

Without ``site`` only the standard library can be imported. The folder of this package is appended to the path, so that
nothing installed beside areal can shadow the standard library.
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

from areal.runtime.shim.supervisor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
