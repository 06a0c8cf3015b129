"""What models read instead of tools' results that they cannot read."""

UNSEEN_IMAGE = "[An image, which this model cannot see.]"
"""In place of an image. A refusal would end an agent's conversation: it sends its tools' results with every turn."""
