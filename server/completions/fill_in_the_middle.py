"""Fill-in-the-middle: the tokens with which models for code mark what comes before and after a hole (arXiv 2207.14255).

Whether a model was trained for it is read from its tokenizer.
"""
# ruff: noqa: RUF001 - DeepSeek's tokens are spelt with full-width bars

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tidewheel.engine.text.tokenizer import Tokenizer

from ..generation.prompt_encoding import PromptEncoder


class _Marks(NamedTuple):
    """The tokens before the prefix, before the suffix and before the answer, if there is one for that."""

    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False


_MARKS = (
    _Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma, Granite 4
    _Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, Stable Code
    _Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    _Marks("<PRE>", "<SUF>", "<MID>"),
    _Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    _Marks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    _Marks("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    _Marks("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
)
_REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILE = ("<|file_sep|>", "<file_sep>", "<filename>")
# An answer ends where the model would begin another file, or pads.
_ENDS = (*_REPOSITORY, *_FILE, "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|endoftext|>", "▁<EOT>", "<EOT>")


class Snippet(NamedTuple):
    """A piece of another file."""

    filename: str
    text: str


class Hole(NamedTuple):
    """What comes after a hole, how its filling begins, and the parts of other files to show to the model."""

    suffix: str
    begun: str = ""
    snippets: Sequence[Snippet] = ()


class FillInTheMiddle:
    """Makes prompts of the text around a hole. `ends` are token ids that end an answer."""

    def __init__(self, marks: _Marks, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._marks = marks
        self._ids = _ids(encoder.tokenizer, (marks.prefix, marks.suffix, marks.middle or ""))
        self._repository = next(iter(_ids(encoder.tokenizer, _REPOSITORY).values()), None)
        self._file = next(iter(_ids(encoder.tokenizer, _FILE).values()), None)
        self.ends = frozenset(_ids(encoder.tokenizer, _ENDS).values())

    @classmethod
    def of(cls, encoder: PromptEncoder) -> FillInTheMiddle | None:
        """The one for a tokenizer; None if it has no tokens for it."""
        for marks in _MARKS:
            names = [name for name in (marks.prefix, marks.suffix, marks.middle) if name]
            if len(_ids(encoder.tokenizer, names)) == len(names):
                return cls(marks, encoder)
        return None

    def token_ids(
        self, prefix: str | list[int], hole: Hole, param: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The prompt of a hole after `prefix`. Raises ApiError (400) naming `param` if that is far too long."""
        before = self._text(prefix, param) if isinstance(prefix, str) else prefix
        after = self._text(hole.suffix, "suffix")
        parts = [[self._ids[self._marks.prefix], *before], [self._ids[self._marks.suffix], *after]]
        if self._marks.suffix_first:
            parts.reverse()
        middle = [self._ids[self._marks.middle]] if self._marks.middle else []
        start = self._start() if add_special_tokens else []
        begun = self._text(hole.begun, "prompt")
        return [*start, *self._context(hole.snippets), *parts[0], *parts[1], *middle, *begun]

    def _context(self, snippets: Sequence[Snippet]) -> list[int]:
        if not snippets:
            return []
        ids = [] if self._repository is None else [self._repository, *self._text("repository\n", "prompt")]
        for i, snippet in enumerate(snippets):
            param = f"input_extra[{i}].text"
            if self._file is None:
                ids += self._text(f"{snippet.text}\n\n", param)
            else:
                ids += [self._file, *self._text(f"{snippet.filename}\n{snippet.text}\n", param)]
            self._encoder.check_prompt(ids, "input_extra")  # before more of what cannot fit is encoded
        return ids if self._file is None else [*ids, self._file, *self._text("current\n", "prompt")]

    def _start(self) -> list[int]:
        """The token that begins a text, where the tokenizer puts one."""
        tokenizer = self._encoder.tokenizer
        bos = tokenizer.bos_token
        bos_id = None if bos is None else tokenizer.token_to_id(bos)
        return [bos_id] if bos_id is not None and tokenizer.encode("", True)[:1] == [bos_id] else []

    def _text(self, text: str, param: str) -> list[int]:
        return self._encoder.count(text, param, add_special_tokens=False) if text else []


def _ids(tokenizer: Tokenizer, names: Iterable[str]) -> dict[str, int]:
    """The ids of the tokens that exist. For all others, some tokenizers give the unknown token's id."""
    found = {name: tokenizer.token_to_id(name) for name in names}
    return {name: i for name, i in found.items() if i is not None and tokenizer.id_to_token(i) == name}
