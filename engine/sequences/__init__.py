"""Sequences: the tokens of a choice, how they are sampled, and beams."""
