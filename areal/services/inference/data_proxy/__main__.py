"""``python -m areal.services.inference.data_proxy``"""

from __future__ import annotations

import sys

from areal.services.inference.data_proxy.options import data_proxy_parser
from areal.services.inference.data_proxy.process import run_data_proxy
from areal.services.web.options import exit_on_failure


def main() -> None:
    run_data_proxy(data_proxy_parser().parse_args())


if __name__ == "__main__":
    sys.exit(exit_on_failure(main))
