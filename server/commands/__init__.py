"""The `tidewheel` command and its subcommands: serve, chat, bench, devices."""
