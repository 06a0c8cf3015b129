"""PairTemplate: the text that a reranker made from a chat model reads a query and a document in."""

from __future__ import annotations

from msgspec import Struct

from ..errors import InvalidRequestError
from .tokenization import EncoderInput, EncoderTokenizer

_JUDGE = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class PairTemplate(Struct, frozen=True):
    """`before`, a query, `between`, a document, `after`. The last begins with a special token."""

    before: str
    between: str
    after: str

    def encode(
        self,
        tokenizer: EncoderTokenizer,
        query: str,
        document: str,
        *,
        truncate_to: int | None = None,
        at_most: int | None = None,
    ) -> EncoderInput:
        """The input of a pair. `truncate_to` cuts the document, then the query, and never what is behind them.

        Raises InvalidRequestError if it leaves no room.
        """
        end = tokenizer.encode(self.after, add_special_tokens=False).token_ids
        room = None if truncate_to is None else truncate_to - len(end)
        if room is not None and room < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be more than the {len(end)} tokens behind a document, got {truncate_to}",
                "truncate_prompt_tokens",
            )
        part = tokenizer.part(f"{self.before}{query}{self.between}{document}", room, at_most)
        if part is None:
            return EncoderInput((), is_too_long=True)
        return EncoderInput([*part.encoding.ids, *end])


def is_qwen3_template(template: str) -> bool:
    """Whether a chat template is Qwen3-Reranker's (https://arxiv.org/abs/2506.05176)."""
    return _JUDGE in template


def qwen3_template(instruction: str | None = None) -> PairTemplate:
    """Qwen3-Reranker's, with its default instruction or another one. The answer comes behind an empty thought."""
    return PairTemplate(
        f'<|im_start|>system\n{_JUDGE} Note that the answer can only be "yes" or "no".<|im_end|>\n'
        f"<|im_start|>user\n<Instruct>: {instruction or _QWEN3_INSTRUCTION}\n<Query>: ",
        "\n<Document>: ",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    )
