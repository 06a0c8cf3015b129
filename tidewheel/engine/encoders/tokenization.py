"""EncoderTokenizer: texts and pairs of texts to an encoder's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from tidewheel.engine.errors import InvalidRequestError, ModelError
from tidewheel.engine.models.folder import read_json
from tidewheel.engine.tokenizer_backends import reading_tokenizer


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One sequence. `type_ids` None are all 0; the first `prompt_length` tokens are left out of the pooled vector."""

    token_ids: Sequence[int]
    type_ids: Sequence[int] | None = None
    prompt_length: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)


class EncoderTokenizer:
    """A model folder's `tokenizer.json`. Safe to use from several threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, lower_case: bool = False, has_type_ids: bool = True) -> None:
        """`lower_case` is for models whose tokenizer expects it to be done before. Without `has_type_ids` all are 0."""
        self.pad_token_id: int | None = (tokenizer.padding or {}).get("pad_id")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if lower_case:
            own = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
            tokenizer.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Lowercase(), *own])
        self._tokenizer = tokenizer
        self._has_type_ids = has_type_ids
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    @classmethod
    def load(cls, folder: Path, *, lower_case: bool = False, pairs: bool = False) -> EncoderTokenizer:
        """A model folder's tokenizer, for `pairs` of texts too. Raises ModelError if there is none or it is broken."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelError(
                f"{folder} has no tokenizer.json: transformers writes one with "
                "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
            )
        config_path = folder / "tokenizer_config.json"
        names = (read_json(config_path) if config_path.exists() else {}).get("model_input_names")
        has_type_ids = not isinstance(names, list) or "token_type_ids" in names
        with reading_tokenizer(path):
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
            made = cls(tokenizer, lower_case=lower_case, has_type_ids=has_type_ids)
            made.encode("a", "a" if pairs else None)
            return made

    def encode(
        self, text: str, pair: str | None = None, *, add_special_tokens: bool = True, truncate_to: int | None = None
    ) -> EncoderInput:
        """A text, or two in one sequence. Longer ones are cut at the end to `truncate_to` tokens, the longer of a pair
        first. Raises InvalidRequestError if that leaves no room for text."""
        encoding = self._tokenizer.encode(text, pair, add_special_tokens=add_special_tokens)
        if truncate_to is not None and len(encoding.ids) > truncate_to:
            encoding = self._truncated(text, pair, add_special_tokens, truncate_to)
        return EncoderInput(encoding.ids, encoding.type_ids if self._has_type_ids else None)

    def prompt_length(self, prompt: str) -> int:
        """How many tokens a prompt takes at the beginning of a text, special ones included."""
        ids = self._tokenizer.encode(prompt).ids
        return len(ids) - (1 if ids and ids[-1] in self._special else 0)

    def _truncated(
        self, text: str, pair: str | None, add_special_tokens: bool, truncate_to: int
    ) -> tokenizers.Encoding:
        tokenizer = self._tokenizer
        special = tokenizer.num_special_tokens_to_add(pair is not None) if add_special_tokens else 0
        room = truncate_to - special
        if room < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must leave room for text beside {special} special tokens, got {truncate_to}",
                "truncate_prompt_tokens",
            )
        first = tokenizer.encode(text, add_special_tokens=False)
        if pair is None:
            first.truncate(room)
            return tokenizer.post_process(first, None, add_special_tokens)
        second = tokenizer.encode(pair, add_special_tokens=False)
        lengths = _fitting(len(first.ids), len(second.ids), room)
        first.truncate(lengths[0])
        second.truncate(lengths[1])
        return tokenizer.post_process(first, second, add_special_tokens)


def _fitting(first: int, second: int, room: int) -> tuple[int, int]:
    """The lengths of a pair after tokens were taken from its longer part until both have `room` (longest first)."""
    shorter = min(first, second, room // 2)
    if first <= second:
        return shorter, min(second, room - shorter)
    return min(first, room - shorter), shorter
