"""The results of a contest: figures, Tidewheel's ratios to the best peer, and tables of both."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from contest import LESS_IS_BETTER, READY, Contestant

from tidewheel.server.commands.bench import text

BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "BF16": 16, "F16": 16,
        "int8": 8, "int8-channel": 8, "Q8_0": 8, "fp8": 8, "Q6_K": 6, "Q5_K_S": 5, "Q5_K_M": 5, "Q5_0": 5, "Q5_1": 5,
        "int4": 4, "Q4_0": 4, "Q4_1": 4, "Q4_K_S": 4, "Q4_K_M": 4, "IQ4_NL": 4, "IQ4_XS": 4, "gptq": 4, "awq": 4,
        "Q3_K_S": 3, "Q3_K_M": 3, "Q3_K_L": 3, "Q2_K": 2}  # fmt: skip


@dataclass(frozen=True)
class Ratio:
    """How many times better than the best peer Tidewheel is: above 1 is faster, sooner ready, or smaller.

    `against` says which peers count: those whose weights have the same number of bits, or all.
    """

    weights: str
    against: str
    scenario: str
    best: str
    ratio: float


def ratios(
    own: Sequence[Contestant],
    peers: Sequence[Contestant],
    scenarios: Sequence[str],
    less_is_better: Collection[str] = LESS_IS_BETTER,
) -> list[Ratio]:
    """Each of Tidewheel's formats against the best peer, wherever both have a figure."""
    found = []
    for contestant in own:
        bits = BITS.get(contestant.weights)
        alike = [peer for peer in peers if bits is not None and BITS.get(peer.weights) == bits]
        for against, rivals in ((f"{bits} bits", alike), ("all", peers)):
            for scenario in scenarios:
                mine = contestant.spread(scenario)
                theirs = {r.name: s.median for r in rivals if (s := r.spread(scenario)) is not None}
                if mine is None or not theirs:
                    continue
                is_less = scenario in less_is_better
                best = (min if is_less else max)(theirs, key=lambda name: theirs[name])
                ratio = theirs[best] / mine.median if is_less else mine.median / theirs[best]
                found.append(Ratio(contestant.weights, against, scenario, best, ratio))
    return found


def figures_table(contestants: Sequence[Contestant], scenarios: Sequence[str]) -> str:
    """A row for each contestant; a dash for what was not measured."""
    heading = ["", "version", *(f"{name}, s" if name == READY else name for name in scenarios)]
    rows = [[c.name, c.version or "-", *(_cell(c, scenario) for scenario in scenarios)] for c in contestants]
    return text.table([heading, *rows])


def ratios_table(found: Sequence[Ratio]) -> str:
    """The ratios of one of Tidewheel's formats: a row for each scenario, a column for each group of peers."""
    groups = list(dict.fromkeys(r.against for r in found))
    cells = {(r.scenario, r.against): f"{r.ratio:.2f} {r.best}" for r in found}
    rows = [
        [scenario, *(cells.get((scenario, group), "-") for group in groups)]
        for scenario in dict.fromkeys(r.scenario for r in found)
    ]
    return text.table([["", *(f"of {group}" for group in groups)], *rows])


def _cell(contestant: Contestant, scenario: str) -> str:
    spread = contestant.spread(scenario)
    return "-" if spread is None else text.spread(spread)
