"""``python -m nvalchemiops``: the same commands as ``nvalchemiops``."""

import sys

from nvalchemiops.cli import main

if __name__ == "__main__":
    sys.exit(main())
