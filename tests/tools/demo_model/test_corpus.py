"""The generated text: the template and the trained spans agree, and held-out prompts stay out of training."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

# The scripts are not part of the installed package, so they are imported from the source tree.
sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from demo_model import corpus
from demo_model.chat import CHAT_TEMPLATE, spans
from demo_model.phrases import HELD_OUT, TRAIN


def _template(trim: bool) -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=trim, lstrip_blocks=trim)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)


@pytest.mark.parametrize("trim", [True, False])
def test_template_renders_what_was_trained(trim: bool) -> None:
    template = _template(trim)
    rng = random.Random(1)
    for _ in range(300):
        item = corpus.training_item(rng)
        if isinstance(item, str):
            continue
        rendered = template.render(messages=item.messages, tools=item.tools or None)
        assert rendered == "".join(text for text, _ in spans(item))


def test_template_takes_part_lists_string_arguments_and_bare_tools() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "3"},
    ]
    rendered = _template(True).render(messages=messages, tools=[{"name": "f"}], add_generation_prompt=True)
    assert '<tools>\n{"name": "f", "description": "", "parameters": {}}\n</tools>' in rendered
    assert "<|im_start|>user\nHello<|im_end|>\n" in rendered
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in rendered
    assert rendered.endswith("<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_same_seed_same_text() -> None:
    first, second = (corpus.training_item(random.Random(5)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("make", [corpus.addition, corpus.subtraction])
def test_number_pairs_are_disjoint(make: Any) -> None:
    rng = random.Random(2)
    seen = {split: {make(rng, split).answer for _ in range(2000)} for split in (TRAIN, HELD_OUT)}
    assert not seen[TRAIN] & seen[HELD_OUT]


@pytest.mark.parametrize("make", [corpus.spelling, corpus.reversal])
def test_words_are_disjoint(make: Any) -> None:
    rng = random.Random(3)
    seen = {split: {make(rng, split).answer for _ in range(2000)} for split in (TRAIN, HELD_OUT)}
    assert not seen[TRAIN] & seen[HELD_OUT]


@pytest.mark.parametrize("skill", corpus.SKILLS)
def test_every_skill_has_held_out_prompts(skill: str) -> None:
    items = corpus.held_out_set(0, 5, (skill,))
    assert len(items) == 5
    assert all(item.exchange is not None and item.exchange.skill == skill for item in items)
