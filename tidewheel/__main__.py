"""`python -m tidewheel` is the `tidewheel` command."""

import sys

from tidewheel.server.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
