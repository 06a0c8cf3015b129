"""The options of `tidewheel serve`: declared once, read from the command line and the environment."""
