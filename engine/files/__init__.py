"""Reading a model folder's files within bounds, and quoting them in errors."""
