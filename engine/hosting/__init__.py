"""Hosting: several models in one process, which are loaded when they are asked for and share one memory budget."""
