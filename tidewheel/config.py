"""Where vLLM has the objects of its options: each name says how to give it here."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        from .names_of_vllm import refuse_name

        refuse_name(__name__, name)
