"""Guesses at the tokens to come."""
