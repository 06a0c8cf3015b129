"""Where the content of KV blocks goes when memory needs their place, and comes back from."""
