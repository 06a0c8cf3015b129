"""Writes the tables of docs/vllm.md from the server's table of vLLM's flags.

Usage, where Tidewheel is installed: python tools/vllm_page.py
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from tidewheel.server.options.serve import SERVE_OPTIONS
from tidewheel.server.options.variables import KNOWN
from tidewheel.server.options.vllm_table import ACCEPTED, NOT_YET, WORKS
from tidewheel.server.options.vllm_table import REFUSED as REFUSED_FLAGS
from tidewheel.server.options.vllm_variables import IDLE, REFUSED

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "vllm.md"


def main() -> None:
    """Write the page."""
    PAGE.write_text(made(PAGE.read_text("utf-8")), "utf-8")


def made(page: str) -> str:
    """The page with its tables filled in. Raises ValueError if it lacks the place of a table."""
    declared = {option.flag for option in SERVE_OPTIONS}
    since = {flag.partition("=")[0] for flags in NOT_YET.values() for flag in flags.split()} & declared
    works = {**WORKS, "": " ".join([WORKS[""], *sorted(since)])}
    tables = {
        "works": _table(("flags", "remark"), works),
        "accepted": _table(("flags", "why they have no effect"), ACCEPTED),
        "refused": _table(("flags", "why, or what to do instead"), {**REFUSED_FLAGS, **NOT_YET}, since),
        "variables": _variables(),
    }
    for name, table in tables.items():
        begin, end = f"<!-- {name}: made by tools/vllm_page.py -->\n", f"<!-- end of {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page must have one block from {begin.strip()} to {end}")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{table}{end}{rest.partition(end)[2]}"
    return page


def _table(head: tuple[str, str], flags: Mapping[str, str], left_out: Container[str] = ()) -> str:
    rows = []
    for why, names in flags.items():
        shown, before = [], ""
        for flag, equals, value in (name.partition("=") for name in names.split()):
            # Written as they are given: `--task=embed`, and without a sign for values of any kind.
            one = flag + equals + value if value not in ("", "*") else flag
            if flag not in left_out:
                shown.append(f"`{value if flag == before else one}`")
            before = flag
        if shown:
            rows.append((", ".join(shown), why))
    return _lines(head, rows)


def _variables() -> str:
    rows = [(f"`{name}`", f"`{o.flag}`") for o in SERVE_OPTIONS for name in o.variables if name.startswith("VLLM_")]
    rows += [(f"`{name}`", why) for name, why in KNOWN.items() if name.startswith("VLLM_")]
    rows += [(f"`{name}`", f"refused: {why}") for name, why in REFUSED.items()]
    rows += [(", ".join(f"`{name}`" for name in names.split()), f"no effect: {why}") for why, names in IDLE.items()]
    return _lines(("variable", "effect"), rows)


def _lines(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    return "".join(f"| {left} | {right} |\n".replace("|  |", "| |") for left, right in (head, ("---", "---"), *rows))


if __name__ == "__main__":
    main()
