"""From the name of a model to an engine that serves it."""
