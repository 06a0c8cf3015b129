# ruff: noqa: E501 - a pattern or a list reads best on one line
"""A story template of a hundred to two hundred tokens, so that streaming has something to show."""

from __future__ import annotations

import random

from .phrases import expand

STORY_PATTERNS = (
    "{tell|write|tell me|write me|make up|invent} {a|a short|a little|a long|a nice|one} {story|tale} {about|with|on} "
    "{a|the|} [topic]",
    "{tell|write|write me|give me} {a|some|a long|a longer} {text|essay|paragraph|longer text} {about|on} {a|the|} [topic]",
    "{can you|could you} {tell|write} {me|} {a|a short|a long} {story|tale} about {a|the|} [topic]",
    "I {want|would like} {a|to hear a|to read a} {story|tale|bedtime story} about {a|the|} [topic]",
    "{story|a story} about {a|the|} [topic]",
    "write {something|a few sentences|ten sentences|two hundred words|a page} about {a|the|} [topic]",
)

_LINES = (
    "Once upon a time there was a {small|quiet|bright|strange} TOPIC near the {sea|river|harbor|old mill}.",
    "Every morning the tide came in, and the big wheel by the shore began to turn.",
    "The people of the {village|town} said that the TOPIC was {only a tale|good for luck|older than the wheel}.",
    "One day a {girl|boy|sailor|miller} named {Ada|Leo|Mina|Otto} came to see it.",
    '"What does the TOPIC do?" {Ada|Leo|Mina|Otto} asked.',
    '"Wait for the water," said the {old man|old woman|miller}, "and you will know."',
    "So they waited while the {sun|moon} climbed over the {hills|roofs|boats}.",
    "Then the water rose, the wheel turned, and the TOPIC {began to sing|began to shine|moved by itself}.",
    "Nobody had ever seen such a {wonder|thing|sight}, and everybody {laughed|danced|cheered}.",
    "From that day on, the TOPIC and the wheel worked together, one turn for every tide.",
    "And if the tide has not gone out, they are {turning|working|singing} there still.",
)


def tell_story(rng: random.Random, topic: str) -> str:
    """Return a story about ``topic``; the hero keeps one name throughout."""
    hero = rng.choice(("Ada", "Leo", "Mina", "Otto"))
    lines = [expand(rng, line.replace("{Ada|Leo|Mina|Otto}", hero)) for line in _LINES]
    return " ".join(lines).replace("TOPIC", topic)
