"""Pipelines: a model's layers shared out to processes of this machine, each with its own weights, cache and cores."""
