"""Constraints on what a sequence may sample: allowed tokens, bad words and grammars, as masks over the vocabulary."""
