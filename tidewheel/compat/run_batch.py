"""`python -m tidewheel.entrypoints.openai.run_batch` is `tidewheel run-batch`."""

from __future__ import annotations

import sys

from tidewheel.server.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(["run-batch", *sys.argv[1:]]))
