"""KV blocks: which are free, what they hold, and who shares them."""
