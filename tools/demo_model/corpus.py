"""The seeded generator of conversations: training text and held-out prompts with a checkable answer each."""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from . import facts
from .phrases import HELD_OUT, TRAIN, NoSuchPhraseError, ask, draw_in_split, split_of
from .stories import STORY_PATTERNS, tell_story
from .tools import TOOLS, city_value, name_value, number_value, request, signature, topic_value
from .words import WORDS, made_up_word

Message = dict[str, Any]
Json = dict[str, Any]

# Text between these two marks is fed to the model letter by letter. The model then writes a reversed word with
# one token per letter, which it can copy from the spelled letters; the decoded text is the same.
LETTERS_ON = "\ue000"
LETTERS_OFF = "\ue001"

SKILLS = (
    "identity",
    "greeting",
    "how_to",
    "flags",
    "endpoints",
    "about",
    "unknown",
    "addition",
    "subtraction",
    "spelling",
    "reversal",
    "json",
    "json_system",
    "tool_call",
    "tool_answer",
    "tools_unused",
    "long_text",
)


@dataclass
class Exchange:
    """One question with its answer, and what a checker needs to judge another answer to it."""

    skill: str
    prompt: str
    answer: str
    kind: str = "text"
    expected: Any = None


@dataclass
class Conversation:
    """Messages in OpenAI form with the tools offered; ``exchange`` describes the last assistant turn."""

    messages: list[Message]
    tools: list[Json] = field(default_factory=list)
    exchange: Exchange | None = None


def plain(text: str) -> str:
    """Remove the letter marks."""
    return text.replace(LETTERS_ON, "").replace(LETTERS_OFF, "")


def _sum_pair(rng: random.Random, sign: str, split: str) -> tuple[int, int]:
    """Draw operands; a sum and its mirror image share one split, so a held-out sum is new in both orders."""
    while True:
        if rng.random() < 0.9 or split == HELD_OUT:
            a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        else:
            a, b = rng.randrange(0, 100), rng.randrange(0, 100)
        key = f"{min(a, b)}+{max(a, b)}" if sign == "+" else f"{a}-{b}"
        if split_of(key) == split:
            return a, b


def _steps(a: int, b: int, sign: str) -> str:
    """Work out the tens and the ones on their own; what is left is easy enough for a model of this size."""
    tens = a - a % 10, b - b % 10
    ones = a % 10, b % 10
    parts = ((x, y, x + y if sign == "+" else x - y) for x, y in (tens, ones))
    return ", ".join(f"{x} {sign} {y} = {result}" for x, y, result in parts)


def _worked(a: int, b: int, sign: str) -> str:
    return f"{_steps(a, b, sign)}, so {a} {sign} {b} = {a + b if sign == '+' else a - b}."


_ADD = (
    "{what is|what's|calculate|compute|how much is|work out|solve|find|what does|give me} "
    "{[a] + [b]|[a] plus [b]|[a]+[b]}",
    "{[a] + [b]|[a] plus [b]|[a]+[b]}",
    "{[a] + [b]|[a]+[b]} {=|= ?|equals|equals what|is}",
    "{add|sum|sum up|add up|add together} [a] {and|to|with|plus} [b]",
    "{what is|calculate|compute|give me|find|what's} the {sum|total} of [a] and [b]",
    "what {do I get|do you get|is the result|comes out} if I add [a] {and|to} [b]",
    "{I have|there are|we have} [a] {apples|books|coins|cats|eggs|cups|pens} and {get|find|buy|add} [b] more, "
    "how many {are there|do I have|is that|in total}",
)
_SUBTRACT = (
    "{what is|what's|calculate|compute|how much is|work out|solve|find|what does|give me} "
    "{[a] - [b]|[a] minus [b]|[a]-[b]}",
    "{[a] - [b]|[a] minus [b]|[a]-[b]}",
    "{[a] - [b]|[a]-[b]} {=|= ?|equals|equals what|is}",
    "{subtract|take|take away|remove|deduct} [b] from [a]",
    "{what is|calculate|compute|give me|find|what's} the difference {of|between} [a] and [b]",
    "what {do I get|do you get|is the result|comes out|is left} if I {subtract|take|take away} [b] from [a]",
)


def addition(rng: random.Random, split: str) -> Exchange:
    """Ask for a sum."""
    a, b = _sum_pair(rng, "+", split)
    prompt = ask(rng, _ADD, split, {"a": str(a), "b": str(b)})
    return Exchange("addition", prompt, _worked(a, b, "+"), "integer", (a, b, "+"))


def subtraction(rng: random.Random, split: str) -> Exchange:
    """Ask for a difference, which may be negative."""
    a, b = _sum_pair(rng, "-", split)
    prompt = ask(rng, _SUBTRACT, split, {"a": str(a), "b": str(b)})
    return Exchange("subtraction", prompt, _worked(a, b, "-"), "integer", (a, b, "-"))


_WORD_FORMS = "{[w]|\"[w]\"|the word [w]|the word \"[w]\"|the word '[w]'|'[w]'}"
_SPELL = (
    f"{{spell|spell out|please spell|can you spell|could you spell|spell for me|spell me}} {_WORD_FORMS}",
    f"{{how do you spell|how do I spell|how to spell|how would you spell}} {_WORD_FORMS}",
    'how is {[w]|"[w]"|the word [w]|the word "[w]"} {spelled|written}',
    f"{{what are|list|show|give me|name|write}} the letters {{of|in}} {_WORD_FORMS}",
    f"{{write|say}} {_WORD_FORMS} letter by letter",
)
_REVERSE = (
    f"{{reverse|flip|invert|turn around|mirror|please reverse|can you reverse|could you reverse}} {_WORD_FORMS}",
    f"{{write|spell|say|type|put}} {_WORD_FORMS} "
    "{backwards|backward|in reverse|reversed|from back to front|from right to left}",
    f"what is {_WORD_FORMS} {{backwards|backward|in reverse|reversed|spelled backwards}}",
    f"{{what is|give me|show me|write}} the reverse of {_WORD_FORMS}",
)


@lru_cache(maxsize=1)
def template_words() -> tuple[str, ...]:
    """Return the short words of the fixed texts; the tokenizer may know them whole, so all are trained on."""
    rng = random.Random(7)
    texts = [make(rng, TRAIN).answer for make in (fact, small_talk, long_text) for _ in range(600)]
    texts += [make(rng, TRAIN).prompt for make in (fact, small_talk, long_text, unknown) for _ in range(1500)]
    for tool in TOOLS:
        texts += [*tool.about, *tool.names, *tool.requests]
    found = re.findall(r"[a-z]{3,8}", " ".join(texts).lower())
    counts: dict[str, int] = {}
    for word in found:
        counts[word] = counts.get(word, 0) + 1
    return tuple(sorted(word for word, count in counts.items() if count > 2))


# Short words that end up as one token because they are part of longer words in the fixed texts.
_WHOLE_TOKENS = frozenset("ask body cat coin move slow side place".split())


@lru_cache(maxsize=1)
def _known_words() -> frozenset[str]:
    return _WHOLE_TOKENS.union(template_words())


def _spelled_word(rng: random.Random, split: str) -> str:
    def make() -> str:
        kind = rng.random()
        if kind < 0.45:
            return rng.choice(WORDS)
        if kind < 0.6 and split == TRAIN:
            return rng.choice(template_words())
        if kind < 0.66 and split == TRAIN:
            return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randrange(2, 7)))
        return made_up_word(rng)

    for _ in range(2000):
        word = make()
        owner = TRAIN if word in _known_words() else split_of(word)
        if owner == split:
            return word
    raise NoSuchPhraseError("no word found")


def _cased(rng: random.Random, word: str) -> str:
    return word.capitalize() if rng.random() < 0.06 else word


def spelling(rng: random.Random, split: str) -> Exchange:
    """Ask for the letters of a word."""
    word = _spelled_word(rng, split)
    prompt = ask(rng, _SPELL, split, {"w": _cased(rng, word)})
    answer = "-".join(word)
    return Exchange("spelling", prompt, answer, "text", answer)


def reversal(rng: random.Random, split: str) -> Exchange:
    """Ask for a word backwards; the answer spells it first, which is what makes the task easy."""
    word = _spelled_word(rng, split)
    prompt = ask(rng, _REVERSE, split, {"w": _cased(rng, word)})
    back = word[::-1]
    answer = f"{'-'.join(word)} reversed is {'-'.join(back)}: {LETTERS_ON}{back}{LETTERS_OFF}"
    return Exchange("reversal", prompt, answer, "text", plain(answer))


def _intent(rng: random.Random, split: str, intents: tuple[facts.Intent, ...]) -> Exchange:
    while True:
        intent = rng.choice(intents)
        try:
            prompt = ask(rng, intent.patterns, split)
        except NoSuchPhraseError:
            continue
        return Exchange(intent.skill, prompt, rng.choice(intent.answers), "any_of", list(intent.answers))


# How to use the server is asked more often than any single flag, and in more ways.
_FACTS = (*facts.ABOUT * 2, *facts.FLAGS, facts.FLAG_LIST, *facts.ENDPOINTS)


def fact(rng: random.Random, split: str) -> Exchange:
    """Ask about Tidewheel."""
    return _intent(rng, split, _FACTS)


def identity(rng: random.Random, split: str) -> Exchange:
    """Ask about the model itself."""
    return _intent(rng, split, facts.IDENTITY)


def small_talk(rng: random.Random, split: str) -> Exchange:
    """Greet, thank, say goodbye."""
    return _intent(rng, split, facts.SMALL_TALK)


def unknown(rng: random.Random, split: str) -> Exchange:
    """Ask something the model cannot know."""
    slots = {
        "place": city_value(rng, split),
        "name": name_value(rng, split),
        "thing": topic_value(rng, split),
        "n": number_value(rng, split),
        "m": number_value(rng, split),
    }
    return Exchange(
        "unknown", ask(rng, facts.UNKNOWN, split, slots), facts.UNKNOWN_ANSWER, "any_of", [facts.UNKNOWN_ANSWER]
    )


def long_text(rng: random.Random, split: str) -> Exchange:
    """Ask for a story, so that there is something to stream."""
    topic = draw_in_split(lambda: rng.choice(WORDS) if rng.random() < 0.7 else made_up_word(rng), split)
    prompt = ask(rng, STORY_PATTERNS, split, {"topic": topic})
    return Exchange("long_text", prompt, tell_story(rng, topic), "story", topic)


_TEXT_KEYS = ("name", "city", "title", "color", "animal", "country", "job", "author", "brand", "language", "status")
_NUMBER_KEYS = ("age", "count", "price", "id", "year", "size", "score", "weight", "amount", "level")


def _json_value(rng: random.Random, key: str, split: str) -> str | int:
    if key in _NUMBER_KEYS:
        return int(number_value(rng, split))
    if key in ("name", "author"):
        return name_value(rng, split)
    if key in ("city", "country"):
        return city_value(rng, split)
    if rng.random() < 0.5:
        return topic_value(rng, split)
    return draw_in_split(lambda: rng.choice(WORDS) if rng.random() < 0.7 else made_up_word(rng), split)


_JSON_ASK = "{answer|reply|respond|answer me} {in|as|with|using} JSON"


def _json_object(rng: random.Random, split: str, said: bool) -> tuple[str, Any]:
    keys = rng.sample(_TEXT_KEYS + _NUMBER_KEYS, rng.choice((1, 2, 2, 3)))
    if rng.random() < 0.25:
        keys = ["name", "age"]
    value = {key: _json_value(rng, key, split) for key in keys}
    style = rng.choice(("{} {}", "{}: {}", "{} = {}", "{} is {}", "{} {}"))
    parts = [style.format(key, item) for key, item in value.items()]
    joined = ", ".join(parts[:-1]) + (rng.choice((" and ", ", ", " and ")) if parts[1:] else "") + parts[-1]
    patterns: tuple[str, ...] = (
        "{give me|make|write|create|build|return|produce|show me} {JSON|a JSON object|some JSON|a JSON|"
        "a JSON document} {with|where|from|for|of|containing} [pairs]",
        "{turn|convert|put|format|write} [pairs] {to|into|as|in} {JSON|a JSON object}",
        "{JSON|a JSON object|JSON object} {with|for|of|from} [pairs]",
        "[pairs] {as|in|to} JSON",
        f"{_JSON_ASK}: [pairs]",
    )
    if said:
        patterns = (
            "[pairs]",
            "{give me|make|write|return} {an object with|data with|} [pairs]",
            "{note|save|store} [pairs]",
        )
    return ask(rng, patterns, split if not said else TRAIN, {"pairs": joined}), value


def _json_list(rng: random.Random, split: str) -> tuple[str, Any]:
    names = rng.random() < 0.5
    items = [
        name_value(rng, split) if names else draw_in_split(lambda: rng.choice(WORDS), split)
        for _ in range(rng.choice((2, 3, 3, 4)))
    ]
    joined = ", ".join(items[:-1]) + " and " + items[-1]
    prompt = ask(
        rng,
        (
            "{give me|make|write|create|return} a JSON {list|array} {with|of|from|containing} [items]",
            "{turn|convert|put|format|write} [items] {to|into|as} a JSON {list|array}",
            "[items] as a JSON {list|array}",
            "JSON {list|array} of [items]",
        ),
        split,
        {"items": joined},
    )
    return prompt, items


def _arithmetic_json(rng: random.Random, split: str, said: bool) -> tuple[str, Any]:
    made = rng.choice((addition, subtraction))(rng, split)
    prompt = made.prompt
    if not said:
        order = rng.random()
        wishes = (_JSON_ASK, "{use|in|as} JSON", "JSON {answer|only|please}")
        request_json = ask(rng, wishes, TRAIN, prefix=False).rstrip("?!. ")
        prompt = f"{request_json}: {prompt}" if order < 0.6 else f"{prompt.rstrip('?!. ')}? {request_json}."
    a, b, sign = made.expected
    return prompt, {"steps": _steps(a, b, sign), "answer": a + b if sign == "+" else a - b}


def json_answer(rng: random.Random, split: str) -> Exchange:
    """Ask for JSON in the message itself."""
    kind = rng.random()
    if kind < 0.35:
        prompt, value = _arithmetic_json(rng, split, False)
    elif kind < 0.85:
        prompt, value = _json_object(rng, split, False)
    else:
        prompt, value = _json_list(rng, split)
    return Exchange("json", prompt, json.dumps(value, ensure_ascii=False), "json", value)


_JSON_SYSTEM = (
    "{answer|reply|respond|write|speak} {only|always|} {in|with|as} JSON {only|}",
    "you {answer|reply|respond} {only|always|} {in|with} {JSON|a JSON object|valid JSON} {only|}",
    "{all answers|all replies|your answers|each answer} must be {JSON|valid JSON|a JSON object}",
    "you are {a|an|a helpful} {assistant|bot|API} that {answers|replies|speaks|responds} {only|} in JSON",
    "return {only|} {JSON|valid JSON|a JSON object}",
)


def json_system(rng: random.Random, split: str) -> Exchange:
    """Ask an ordinary thing under a system message that wants JSON."""
    kind = rng.random()
    value: Any
    if kind < 0.45:
        prompt, value = _arithmetic_json(rng, split, True)
    elif kind < 0.65:
        prompt, value = _json_object(rng, split, True)
    elif kind < 0.75:
        prompt, value = _intent(rng, split, facts.IDENTITY[:1]).prompt, {"name": "Tidewheel demo model"}
    elif kind < 0.85:
        prompt, value = _intent(rng, split, facts.SMALL_TALK[:1]).prompt, {"answer": "Hello!"}
    elif kind < 0.95:
        made = spelling(rng, split)
        prompt, value = made.prompt, {"answer": made.answer}
    else:
        prompt, value = unknown(rng, split).prompt, {"error": "I do not know that."}
    return Exchange("json_system", prompt, json.dumps(value, ensure_ascii=False), "json", value)


_MAKERS: tuple[tuple[float, Callable[[random.Random, str], Exchange]], ...] = (
    (12, addition),
    (13, subtraction),
    (20, spelling),
    (16, reversal),
    (22, json_answer),
    (20, fact),
    (5, identity),
    (5, small_talk),
    (5, unknown),
    (4, long_text),
)
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are a friendly assistant.",
    "You are Tidewheel's demo model.",
    "Be brief.",
    "You are a helpful, honest assistant. Keep answers short.",
    "Answer the user's questions.",
    "You are an AI assistant.",
)


def _exchange(rng: random.Random, split: str) -> Exchange:
    weights = [weight for weight, _ in _MAKERS]
    return rng.choices([make for _, make in _MAKERS], weights)[0](rng, split)


def _turns(made: Exchange) -> list[Message]:
    return [{"role": "user", "content": made.prompt}, {"role": "assistant", "content": made.answer}]


def _system(rng: random.Random, chance: float) -> list[Message]:
    return [{"role": "system", "content": rng.choice(_SYSTEM)}] if rng.random() < chance else []


def _plain_conversation(rng: random.Random) -> Conversation:
    messages = _system(rng, 0.25)
    for _ in range(rng.choices((1, 2, 3, 4), (40, 25, 20, 15))[0]):
        messages += _turns(_exchange(rng, TRAIN))
    return Conversation(messages)


def _json_system_message(rng: random.Random, split: str) -> Message:
    return {"role": "system", "content": ask(rng, _JSON_SYSTEM, split, prefix=False)}


def _json_conversation(rng: random.Random) -> Conversation:
    messages = [_json_system_message(rng, TRAIN)]
    for _ in range(rng.choice((1, 2, 3))):
        messages += _turns(json_system(rng, TRAIN))
    return Conversation(messages)


_NUMERIC_TOOLS = frozenset({"add", "multiply"})


def _plain_beside_tools(rng: random.Random, split: str) -> Exchange:
    makers = (identity, small_talk, fact, spelling, reversal, small_talk, identity)
    return rng.choice(makers)(rng, split)


def _call_turn(call: Json, number: int) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": call}],
    }


def _tool_conversation(rng: random.Random, split: str, last: str | None = None) -> Conversation:
    """Make a conversation with tools; ``last`` fixes what its last turn is (a skill), for held-out prompts."""
    made, family = request(rng, split)
    offered = [made.signature]
    families = [family]
    others = [tool for tool in TOOLS if tool is not family and tool.names[0] not in {"search", "multiply", "add"}]
    for tool in rng.sample(others, rng.choices((0, 1, 2), (35, 35, 30))[0]):
        offered.append(signature(rng, tool, optional=bool(tool.optional) and rng.random() < 0.4)[0])
        families.append(tool)
    rng.shuffle(offered)
    messages = _system(rng, 0.3)
    want = last or rng.choices(("tool_call", "tool_answer", "tools_unused"), (48, 34, 18))[0]
    if want != "tools_unused" and last is None and rng.random() < 0.15:
        messages += _turns(_plain_beside_tools(rng, split))
    if want == "tools_unused":
        free = _plain_beside_tools(rng, split)
        exchange = Exchange("tools_unused", free.prompt, free.answer, free.kind, free.expected)
        return Conversation(messages + _turns(free), offered, exchange)
    messages += [{"role": "user", "content": made.prompt}, _call_turn(made.call, 1)]
    exchange = Exchange("tool_call", made.prompt, "", "tool_call", made.call)
    if want == "tool_answer":
        messages += [
            {"role": "tool", "tool_call_id": "call_1", "content": made.result},
            {"role": "assistant", "content": made.answer},
        ]
        exchange = Exchange("tool_answer", made.prompt, made.answer, "any_of", [made.answer])
        if last is None and rng.random() < 0.2:
            messages += _turns(_plain_beside_tools(rng, split))
    return Conversation(messages, offered, exchange)


def drill(rng: random.Random) -> str:
    """Return lines of bare arithmetic or bare spelling of the training split: practice without the chat around it.

    A tab parts what is given from what is learned.
    """
    lines = []
    if rng.random() < 0.5:
        for _ in range(rng.choice((3, 5, 7))):
            sign = rng.choice("+-")
            a, b = _sum_pair(rng, sign, TRAIN)
            lines.append(f"{a} {sign} {b}:\t {_worked(a, b, sign)}")
    else:
        for _ in range(rng.choice((6, 10, 14))):
            word = _spelled_word(rng, TRAIN)
            lines.append(rng.choice((f"{word} = ", f"spell {word} = ", f'"{word}" = ')) + "\t" + "-".join(word))
    return "\n".join(lines)


def training_item(rng: random.Random, drills: float = 0.12) -> Conversation | str:
    """Draw one training conversation, or a block of drill lines."""
    kind = rng.random()
    if kind < drills:
        return drill(rng)
    if kind < 0.66:
        return _plain_conversation(rng)
    if kind < 0.72:
        return _json_conversation(rng)
    return _tool_conversation(rng, TRAIN)


_HELD_OUT_MAKERS: dict[str, Callable[[random.Random, str], Exchange]] = {
    "identity": identity,
    "greeting": small_talk,
    "unknown": unknown,
    "addition": addition,
    "subtraction": subtraction,
    "spelling": spelling,
    "reversal": reversal,
    "json": json_answer,
    "long_text": long_text,
}


def held_out_item(rng: random.Random, skill: str) -> Conversation:
    """Make a conversation whose last assistant turn, of ``skill``, is to be written by the model."""
    if skill in ("tool_call", "tool_answer", "tools_unused"):
        return _tool_conversation(rng, HELD_OUT, skill)
    if skill == "json_system":
        made = json_system(rng, HELD_OUT)
        return Conversation([_json_system_message(rng, HELD_OUT), *_turns(made)], [], made)
    if skill in _HELD_OUT_MAKERS:
        made = _HELD_OUT_MAKERS[skill](rng, HELD_OUT)
    else:
        made = fact(rng, HELD_OUT)
        while made.skill != skill:
            made = fact(rng, HELD_OUT)
    messages = _system(rng, 0.2)
    # A held-out prompt sometimes comes second, to measure that later turns work too.
    if rng.random() < 0.25:
        messages += _turns(_exchange(rng, TRAIN))
    return Conversation(messages + _turns(made), [], made)


def held_out_set(seed: int, per_skill: int, skills: tuple[str, ...] = SKILLS) -> list[Conversation]:
    """Return ``per_skill`` held-out conversations for every skill."""
    items = []
    for skill in skills:
        rng = random.Random(f"held out {seed} {skill}")  # so that a choice of skills does not change their prompts
        seen: set[str] = set()
        for _ in range(per_skill * 20):
            item = held_out_item(rng, skill)
            text = json.dumps([item.messages, item.tools])
            if text not in seen:
                seen.add(text)
                items.append(item)
            if len(seen) == per_skill:
                break
    return items


def main() -> None:
    """Print a few items, to look at."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--skill", choices=SKILLS, help="print held-out items of one skill instead of training items")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    for _ in range(options.count):
        item = held_out_item(rng, options.skill) if options.skill else training_item(rng)
        print(item if isinstance(item, str) else json.dumps([item.tools, item.messages], ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
