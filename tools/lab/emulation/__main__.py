"""``python -m lab.emulation``: see run.py."""

import sys

from lab.emulation.run import main

if __name__ == "__main__":
    sys.exit(main())
