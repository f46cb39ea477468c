"""Run the command ``spdl-media`` as ``python -m spdl_media``."""

import sys

from spdl_media.cli import main

if __name__ == "__main__":
    sys.exit(main())
