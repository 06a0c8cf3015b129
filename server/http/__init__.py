"""HTTP below the API: listening, connections and their limits, middleware, shutdown."""
