"""`python -m tidewheel.entrypoints.openai.api_server` is `tidewheel serve`."""

from __future__ import annotations

import sys

from tidewheel.server.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
