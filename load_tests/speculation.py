"""Measures the gain from draft tokens: the same prompts with and without them, in turn, with medians.

python load_tests/speculation.py --draft-model ./draft
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from tidewheel import LLM, RequestOutput, SamplingParams, StructuredOutputsParams

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from demo_model.corpus import SKILLS, held_out_set

Messages = list[dict[str, Any]]

_SEED = 21
_MAX_TOKENS = 200
_BATCH = 32
_PEOPLE = (("Ann Lee", "12345", 3), ("Bo Ray", "54321", 12), ("Cy Dunn", "90210", 7), ("Di West", "10115", 1))
_ORDER = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 20},
        "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
        "is_express_delivery": {"type": "boolean"},
    },
    "required": ["customer_name", "postal_code", "quantity", "is_express_delivery"],
    "additionalProperties": False,
}
_ORDERS = {
    "type": "object",
    "properties": {"orders": {"type": "array", "items": _ORDER, "minItems": 4, "maxItems": 4}},
    "required": ["orders"],
    "additionalProperties": False,
}


class Work(NamedTuple):
    """Conversations that are answered `batch` at a time, optionally as JSON by a `schema`."""

    name: str
    conversations: list[Messages]
    batch: int = 1
    schema: Mapping[str, Any] | None = None


class Run(NamedTuple):
    """Tokens a second while answers were written, tokens a second over the whole time, and the answers' tokens."""

    decode: float
    whole: float
    tokens: list[list[int]]


def held_out(skills: tuple[str, ...], per_skill: int) -> list[Messages]:
    """Prompts of the built-in model's own kind that it was not trained on."""
    items = held_out_set(_SEED, per_skill, skills)
    prompts = [item.messages[: _last_answer(item.messages)] for item in items if not item.tools]
    Random(_SEED).shuffle(prompts)
    return prompts


def _last_answer(messages: Messages) -> int:
    return max(i for i, message in enumerate(messages) if message["role"] == "assistant")


def quoting(llm: LLM, count: int) -> list[Messages]:
    """Conversations in which a story was told and is requested again."""
    stories = held_out(("long_text",), count)
    answers = [output.outputs[0].text for output in llm.chat(stories, _params(None), use_tqdm=False)]
    return [
        [*messages, {"role": "assistant", "content": answer}, messages[-1]]
        for messages, answer in zip(stories, answers, strict=True)
    ]


def extraction(count: int) -> list[Messages]:
    """Orders to be listed as JSON."""
    random = Random(_SEED)
    return [
        [{"role": "user", "content": f"List the orders as JSON ({i}): " + "; ".join(_orders(random))}]
        for i in range(count)
    ]


def _orders(random: Random) -> list[str]:
    return [f"{name} at {code} wants {count}" for name, code, count in random.sample(_PEOPLE, 4)]


def _params(schema: Mapping[str, Any] | None) -> SamplingParams:
    structured = None if schema is None else StructuredOutputsParams(json=json.dumps(schema))
    return SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, structured_outputs=structured)


def run(llm: LLM, work: Work) -> Run:
    """Answer all of it once."""
    outputs: list[RequestOutput] = []
    started = perf_counter()
    for first in range(0, len(work.conversations), work.batch):
        batch = work.conversations[first : first + work.batch]
        outputs += llm.chat(batch, _params(work.schema), use_tqdm=False)
    elapsed = perf_counter() - started
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    count = sum(map(len, tokens))
    if work.batch > 1:
        return Run(count / elapsed, count / elapsed, tokens)
    spans = [metrics.last_token_ts - metrics.first_token_ts for output in outputs if (metrics := output.metrics)]
    return Run((count - len(tokens)) / sum(spans), count / elapsed, tokens)


def pairs(plain: LLM, drafting: LLM, work: Work, rounds: int) -> list[tuple[Run, Run]]:
    """Both in turn. Ends the program if an answer depends on draft tokens."""
    both = plain, drafting
    for llm in both:
        run(llm, work)
    measured = []
    for i in range(rounds):
        runs = {llm: run(llm, work) for llm in (both if i % 2 == 0 else reversed(both))}
        if runs[plain].tokens != runs[drafting].tokens:
            sys.exit(f"{work.name}: the answers differ")
        measured.append((runs[plain], runs[drafting]))
    return measured


def _row(work: Work, method: str, measured: list[tuple[Run, Run]]) -> str:
    figures: list[Callable[[Run], float]] = [lambda one: one.decode, lambda one: one.whole]
    cells = []
    for figure in figures if work.batch == 1 else figures[1:]:
        ratios = sorted(figure(drafting) / figure(plain) for plain, drafting in measured)
        cells.append(
            f"{median(figure(plain) for plain, _ in measured):.0f} -> "
            f"{median(figure(drafting) for _, drafting in measured):.0f} tokens/s, "
            f"x {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    names = ("decode", "whole answers") if work.batch == 1 else ("whole answers",)
    figures_of = "; ".join(f"{name} {cell}" for name, cell in zip(names, cells, strict=True))
    return f"{work.name}, {method}: {figures_of}"


def main() -> None:
    """Measure and print a line for each kind of work and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft-model", help="folder of a draft model; without one, that method is left out")
    parser.add_argument("--methods", default="draft_model,ngram,suffix", help="those to measure")
    parser.add_argument("--prompts", type=int, default=32, help="of each kind of work")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of each")
    args = parser.parse_args()
    with LLM(max_model_len=2048, max_num_seqs=_BATCH) as plain:
        alone = held_out(SKILLS, -(-args.prompts // 8))
        works = [
            Work("held-out prompts", alone[: args.prompts]),
            Work("held-out stories", held_out(("long_text",), max(args.prompts // 4, 1))),
            Work("a story again", quoting(plain, max(args.prompts // 4, 1))),
            Work("JSON of a schema", extraction(max(args.prompts // 4, 1)), schema=_ORDERS),
            Work(f"held-out prompts, {_BATCH} at a time", (alone * _BATCH)[: 4 * _BATCH], _BATCH),
        ]
        for method in args.methods.split(","):
            config: dict[str, Any] = {"method": method}
            if method == "draft_model":
                if args.draft_model is None:
                    continue
                config["model"] = args.draft_model
            with LLM(max_model_len=2048, max_num_seqs=_BATCH, speculative_config=config) as drafting:
                for work in works:
                    print(_row(work, method, pairs(plain, drafting, work, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
