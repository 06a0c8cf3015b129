"""One request's way through the engine: admitted, encoded, constrained, submitted, streamed."""
