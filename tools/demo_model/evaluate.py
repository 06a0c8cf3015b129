"""Measure the demo model on held-out prompts: greedy decoding with transformers, accuracy per skill.

The exit status is 1 when any skill is below the wanted accuracy.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from .corpus import SKILLS, Conversation, Exchange, held_out_set, plain

_CALL = re.compile(r"<tool_call>\n(\{.*\})\n</tool_call>", re.DOTALL)


def is_right(exchange: Exchange, answer: str) -> bool:
    """Judge ``answer``: facts and words must match to the letter, JSON and calls must parse and agree."""
    expected = exchange.expected
    if exchange.kind == "integer":
        return answer == exchange.answer
    if exchange.kind == "json":
        return bool(_parsed(answer) == expected)
    if exchange.kind == "tool_call":
        match = _CALL.fullmatch(answer)
        return bool(match and _parsed(match.group(1)) == expected)
    if exchange.kind == "any_of":
        return answer in expected
    if exchange.kind == "story":
        # Any story will do if it is about the topic, of a fair length, and comes to its end.
        return str(expected) in answer and 90 <= len(answer.split()) <= 250 and answer.endswith(".")
    return bool(answer == expected)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


@torch.inference_mode()
def answers(model: Any, tokenizer: Any, items: list[Conversation], batch: int, device: str) -> list[str]:
    """Return the greedy answer to every item; items of similar length share a batch."""
    prompts = [
        tokenizer.apply_chat_template(
            [{**message, "content": plain(message["content"])} for message in item.messages[:-1]],
            tools=item.tools or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        for item in items
    ]
    order = sorted(range(len(items)), key=lambda number: len(str(prompts[number])))
    replies = [""] * len(items)
    for at in range(0, len(order), batch):
        chosen = order[at : at + batch]
        inputs = tokenizer(
            [str(prompts[number]) for number in chosen], return_tensors="pt", padding=True, add_special_tokens=False
        ).to(device)
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            temperature=None,
            top_p=None,
            max_new_tokens=320,
        )
        for number, tokens in zip(chosen, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            end = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else len(tokens)
            finished = end < len(tokens)
            replies[number] = str(tokenizer.decode(tokens[:end])) if finished else "(did not end)"
    return replies


def evaluate(options: argparse.Namespace) -> int:
    """Print the table and the JSON line; return the exit status."""
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    sees = AutoConfig.from_pretrained(options.model).model_type == "llava"
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM  # train.py alone writes one without eyes
    model = kind.from_pretrained(options.model, dtype=torch.bfloat16).to(options.device).eval()
    skills = tuple(options.skills.split(",")) if options.skills else SKILLS
    report: dict[str, dict[str, float]] = {}
    print(f"{'skill':<14}{'right':>7}{'asked':>7}{'accuracy':>10}")
    for skill in skills:
        items = held_out_set(options.seed, options.per_skill, (skill,))
        replies = answers(model, tokenizer, items, options.batch, options.device)
        right = 0
        shown = 0
        for item, reply in zip(items, replies, strict=True):
            assert item.exchange is not None
            if is_right(item.exchange, reply):
                right += 1
            elif shown < options.show:
                shown += 1
                wanted = item.exchange.answer or item.exchange.expected
                print(f"  {item.exchange.prompt!r}\n    wanted {wanted!r}\n    got    {reply!r}")
        report[skill] = {"right": right, "asked": len(items), "accuracy": round(right / len(items), 4)}
        print(f"{skill:<14}{right:>7}{len(items):>7}{right / len(items):>10.1%}", flush=True)
    right_total = sum(entry["right"] for entry in report.values())
    asked_total = sum(entry["asked"] for entry in report.values())
    print(f"{'all':<14}{right_total:>7.0f}{asked_total:>7.0f}{right_total / asked_total:>10.1%}")
    print(json.dumps({"seed": options.seed, "skills": report, "accuracy": round(right_total / asked_total, 4)}))
    low = [skill for skill, entry in report.items() if entry["accuracy"] < options.wanted]
    if low:
        print(f"below {options.wanted:.0%}: {', '.join(low)}", file=sys.stderr)
    return 1 if low else 0


def main() -> int:
    """Read the command line and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parents[2] / "server" / "demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-skill", type=int, default=200)
    parser.add_argument("--skills", help="a comma-separated choice; all without it")
    parser.add_argument("--wanted", type=float, default=0.9)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per skill")
    return evaluate(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
