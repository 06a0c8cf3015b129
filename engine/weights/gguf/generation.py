"""What a GGUF file says about generating: end tokens and suggested sampling."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ...models.generation import GenerationConfig, token_ids
from .fields import Fields
from .reader import GgufFile

logger = logging.getLogger(__name__)

_CONTROL, _USER_DEFINED = 3, 4
# Suggestions of other kinds of sampling, and the values that change nothing.
_OTHER_SAMPLING = {"xtc_probability": 0, "mirostat": 0}
# What ends a turn in the templates of models whose files name only the end of a text.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<turn|>", "<|tool_response>")
# In OpenAI's harmony format, <|end|> ends one message of an answer, and these end the answer.
_HARMONY, _HARMONY_ENDS, _MESSAGE_END = ("<|channel|>", "<|message|>"), ("<|return|>", "<|call|>"), "<|end|>"


def generation_of(file: GgufFile, config: Mapping[str, Any]) -> GenerationConfig:
    """The tokens that end a text, a turn or a message, and the sampling under `general.sampling`. Special tokens that
    `config` names stand in place of the file's.

    Raises ModelError, naming the file and the key, for a value of the wrong kind.
    """
    sampling, tokens = Fields(file, "general.sampling."), Fields(file, "tokenizer.ggml.")
    for key, harmless in _OTHER_SAMPLING.items():
        if sampling.optional_number(key) not in (None, harmless):
            logger.warning("%s suggests sampling by %s, which is not supported and has no effect", file.path, key)
    ends = token_ids(config, "eos_token_id", file.path) or _end_tokens(file, tokens)
    begins = token_ids(config, "bos_token_id", file.path)
    return GenerationConfig(
        eos_token_ids=ends,
        bos_token_id=begins[0] if begins else tokens.optional_integer("bos_token_id"),
        temperature=sampling.optional_number("temp"),
        top_p=sampling.optional_number("top_p"),
        top_k=sampling.optional_integer("top_k"),
        min_p=sampling.optional_number("min_p"),
        repetition_penalty=sampling.optional_number("penalty_repeat"),
        origin=str(file.path),
    )


def _end_tokens(file: GgufFile, fields: Fields) -> tuple[int, ...]:
    found = [fields.optional_integer(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    template = Fields(file).optional_text("tokenizer.chat_template")
    if template is not None:
        tokens = fields.strings("tokens")
        types = fields.numbers("token_type", len(tokens))
        ends = [token for token in _TURN_ENDS if token in template]
        if all(tag in template for tag in _HARMONY):
            ends = [*_HARMONY_ENDS]
            found = [i for i in found if i is None or i != tokens.find(_MESSAGE_END)]
        named = [tokens.find(token) for token in ends] if types else []
        found += [i for i in named if i is not None and types and types[i] in (_CONTROL, _USER_DEFINED)]
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))
