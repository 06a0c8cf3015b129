"""Speculative decoding: drafters propose tokens, one policy decides who gets them, and the model confirms them."""
