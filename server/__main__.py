"""`python -m tidewheel.server --model ...` is `tidewheel serve`."""

import sys

from .commands.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
