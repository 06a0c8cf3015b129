"""The engine: sequences, KV blocks and steps. It never sees HTTP."""
