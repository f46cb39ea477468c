"""``python -m spdl_media``: the command ``spdl-media``."""

import sys

from spdl_media.cli import main

if __name__ == "__main__":
    sys.exit(main())
