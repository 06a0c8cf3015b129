"""The tables of docs/vllm.md follow the server's table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import vllm_page  # noqa: E402


def test_the_tables_are_up_to_date() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text("utf-8")
    assert vllm_page.made(page) == page, "run: python tools/vllm_page.py"


def test_a_page_without_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="one block from <!-- works"):
        vllm_page.made("# vLLM\n")
