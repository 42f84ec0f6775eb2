"""`python -m blockyard`: the same commands as the installed `blockyard` script."""

from __future__ import annotations

import sys

from blockyard.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
