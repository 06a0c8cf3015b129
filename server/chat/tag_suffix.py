"""The suffix that a vocabulary has in every tag, such as `:6124c78e` in `<think:6124c78e>`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidewheel.engine.text.tokenizer import Tokenizer

_SUFFIX = re.compile(r":\w{1,32}")
_MOST = 4096


def tag_suffix(tag: str, tokenizer: Tokenizer) -> str:
    """The suffix of `<tag>` in a vocabulary, empty if it has none. The tokens or the chat template show it."""
    template = tokenizer.chat_template or ""
    templates = [template] if isinstance(template, str) else template.values()
    shown = dict.fromkeys(found for text in (*tokenizer.special_ids(), *templates) for found in _SUFFIX.findall(text))
    suffixes = (suffix for suffix in [*shown][:_MOST] if tokenizer.token_to_id(f"<{tag}{suffix}>") is not None)
    return next(suffixes, "")
