"""Command lines and environments to options, as those who use the options have declared them."""
