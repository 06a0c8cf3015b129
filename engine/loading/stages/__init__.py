"""From a model to the stages of its pipeline, each loaded in the process that computes it."""
