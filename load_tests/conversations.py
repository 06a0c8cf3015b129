"""The mix of conversations that `routing.py` plays. It depends only on the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from target import WORDS

ANSWER_TOKENS = 24
SESSION_HEADER = "x-session-id"
SESSION_FIELD = "prompt_cache_key"

_SYSTEM_PROMPTS = 6
_SYSTEM_WORDS = 120
_QUESTION_WORDS = (8, 60)  # minimum and maximum
_TURNS = (2, 6)
_PAUSE = 12  # conversations that begin until the next question comes, on average


@dataclass(frozen=True)
class Conversation:
    """A client's turns. `named_by` is the header or body field that identifies it to routers; None for none."""

    number: int
    system: str | None
    questions: tuple[str, ...]
    named_by: str | None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of each request."""
        return {SESSION_HEADER: self._name} if self.named_by == SESSION_HEADER else {}

    def body(self, answers: Sequence[str]) -> dict[str, Any]:
        """The next chat request, after these answers."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for question, answer in zip(self.questions, answers, strict=False):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": self.questions[len(answers)]})
        named = {SESSION_FIELD: self._name} if self.named_by == SESSION_FIELD else {}
        return {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True, **named}

    @property
    def _name(self) -> str:
        return f"conversation {self.number}"


@dataclass(frozen=True)
class Mix:
    """Conversations, and their numbers in the order in which their turns are sent."""

    conversations: tuple[Conversation, ...]
    order: tuple[int, ...]


def make_mix(conversations: int, seed: int) -> Mix:
    """Conversations of two to six turns. One in seven has no system prompt.

    A third is identified by the header, a third by the field, and a third by nothing.

    They begin one after the other, and their later turns are interleaved with those of others.
    """
    chance = random.Random(seed)
    systems = [_words(chance, _SYSTEM_WORDS) for _ in range(_SYSTEM_PROMPTS)]
    # The popularity of system prompts falls as 1/rank does.
    weights = [1 / (rank + 1) for rank in range(_SYSTEM_PROMPTS)]
    made, arrivals = [], []
    for number in range(conversations):
        system = None if chance.random() < 1 / 7 else chance.choices(systems, weights)[0]
        questions = tuple(_words(chance, chance.randint(*_QUESTION_WORDS)) for _ in range(chance.randint(*_TURNS)))
        made.append(Conversation(number, system, questions, chance.choice((SESSION_HEADER, SESSION_FIELD, None))))
        now = float(number)
        for _ in questions:
            arrivals.append((now, number))
            now += chance.expovariate(1 / _PAUSE)
    return Mix(tuple(made), tuple(number for _, number in sorted(arrivals)))


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))
