"""Buckets that are read from a file, in the form that Gaudi's vLLM plug-in reads: one tuple or product a line."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from itertools import product

from ..errors import DeviceError
from .bucketing import Bucket, BucketPlan, LeftOut, StepSizes, ascending

_FORM = "(batch size, tokens, blocks), where each is a number, a list [1, 2] or range(first, last, step)"


def plan_of_file(name: str, lines: Iterable[str], sizes: StepSizes) -> tuple[BucketPlan, LeftOut]:
    """The buckets of a file's lines, less those that no step can use.

    A line is `(batch_size, query_len, blocks)`. With a query of 1 token it is a decode of that many KV blocks, of all
    sequences together; else a prompt behind that many cached blocks. A number may be a list, or a range that includes
    its end: the line means all combinations. `#` begins a comment. Raises DeviceError that names the line.
    """
    prompts: set[Bucket] = set()
    contexts: set[Bucket] = set()
    decodes: set[Bucket] = set()
    given: set[tuple[int, int, int]] = set()
    for number, line in enumerate(lines, 1):
        try:
            for batch_size, query_len, blocks in _combinations(line):
                given.add((batch_size, query_len, blocks))
                if query_len == 1:
                    decodes.add(Bucket(batch_size, 1, min(-(-blocks // batch_size), sizes.max_width)))
                elif not blocks:
                    prompts.add(Bucket(batch_size, query_len, sizes.blocks(query_len)))
                elif batch_size == 1:
                    contexts.add(Bucket(1, query_len, min(sizes.blocks(query_len) + blocks, sizes.max_width)))
                else:
                    raise ValueError("a prompt with cached blocks runs on its own: its batch size must be 1")
        except ValueError as error:
            raise DeviceError(f"{name}, line {number}: {error}") from None
    plan = BucketPlan(
        ascending(filter(sizes.allow_prompt, prompts)),
        ascending(filter(sizes.allow_prompt, contexts - prompts)),
        ascending(filter(sizes.allow_decode, decodes)),
        sizes.block_size,
    )
    for kind, buckets in (("prompts", plan.prompts), ("decodes", plan.decodes)):
        if not buckets:
            raise DeviceError(f"{name} has no bucket for {kind} that a step can use: lines are {_FORM}")
    num_decodes = sum(query_len == 1 for _, query_len, _ in given)
    left_out = LeftOut(
        len(given) - num_decodes - len(plan.prompts) - len(plan.contexts), num_decodes - len(plan.decodes)
    )
    return plan, left_out


def _combinations(line: str) -> Iterator[tuple[int, int, int]]:
    text = line.partition("#")[0].strip()
    if not text:
        return
    try:
        parsed = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        parsed = None
    if not isinstance(parsed, ast.Tuple) or len(parsed.elts) != 3:
        raise ValueError(f"must be {_FORM}, got {text!r}")
    batch_sizes, query_lens, blocks = (_numbers(node, text) for node in parsed.elts)
    if min(*batch_sizes, *query_lens) < 1 or min(blocks) < 0:
        raise ValueError(f"batch size and tokens must be at least 1, blocks at least 0, got {text!r}")
    if 1 in query_lens and 0 in blocks:
        raise ValueError(f"a decode has at least 1 block, got {text!r}")
    yield from product(batch_sizes, query_lens, blocks)


def _numbers(node: ast.expr, text: str) -> list[int]:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return [number]
        case ast.List(elts=[_, *_] as items):
            return [number for item in items for number in _numbers(item, text)]
        case ast.Call(func=ast.Name(id="range"), args=[_, _, *_] as bounds, keywords=[]) if len(bounds) <= 3:
            first, last, *step = (number for bound in bounds for number in _numbers(bound, text))
            if first <= last and (not step or step[0] > 0):
                return list(range(first, last + 1, *step))
    raise ValueError(f"{ast.unparse(node)} is not a number, list or range: must be {_FORM}, got {text!r}")
