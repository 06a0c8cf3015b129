"""What a decoder is served as: an embedding model, a classifier, or a reranker that answers with a token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from msgspec import Struct

from ..errors import ModelError
from ..files.reading import MAX_TOKENIZER_BYTES, require_file
from ..files.wording import shown
from ..text.tokenizer import chat_templates
from ..text.tokenizer_backends import reading_tokenizer
from .families import FAMILIES
from .families.decoder import REWARDS, decoder_of
from .model import AnswerTokens
from .options import Convert
from .pair_template import PairTemplate, has_pair_roles, qwen3_template, read_template
from .tokenization import special_texts

_QWEN3_RERANKER = "qwen3-reranker"
_QWEN3_TOKENS = ("no", "yes")


class Conversion(Struct, frozen=True):
    """A config as its model is served: a decoder that `converts`, or a reranker whose scores are its `answer`."""

    config: Mapping[str, Any]
    converts: bool = False
    answer: AnswerTokens | None = None

    @property
    def classifies(self) -> bool:
        """Whether it gives logits of labels."""
        return self.answer is not None or str(self.config["architectures"][0]).endswith("ForSequenceClassification")


def conversion(
    folder: Path, config: Mapping[str, Any], convert: Convert, *, listed: bool, answer: AnswerTokens | None
) -> Conversion:
    """What to serve the decoder in a folder as. A config of any other model stays as it is.

    `listed`: there is a modules.json, which may name a reranker's `answer`. Raises ModelError if the decoder cannot be
    served so, and says what to do.
    """
    name = str(config["architectures"][0])
    decoder = decoder_of(name)
    if decoder is None or name in FAMILIES:
        return Conversion(config)
    if convert in ("auto", "classify"):
        if answer is None:
            plain = decoder.use == "generates" and not listed
            answer = _answer(folder, config, is_reranker=plain and _is_named_reranker(folder, config))
        if answer is not None:
            return Conversion({**config, "id2label": {"0": "LABEL_0"}}, answer=answer)
    if convert == "embed":
        return Conversion({**config, "architectures": [decoder.architecture]}, converts=True)
    if (reward := REWARDS.get(name)) is not None:
        # A reward has no bounds; the two labels of a step are probabilities.
        labels = {str(index): f"LABEL_{index}" for index in range(reward.num_labels)}
        kind = {"problem_type": "regression"} if reward.num_labels == 1 else {}
        return Conversion({**kind, **config, "id2label": labels})
    if decoder.use in ("classifies", "classifies tokens"):
        return Conversion(config)
    if convert == "classify":
        raise ModelError(
            f"{folder}: {name} has no classifier's head. For a reranker that answers with a token, config.json must "
            'name the answers: "classifier_from_token": ["no", "yes"]'
        )
    if decoder.use == "generates" and not (convert == "auto" and listed):
        raise ModelError(
            f"{folder}: {name} generates text, and no modules.json says that it is an embedding model: embed with it "
            "by converting it (--convert embed), or serve it as a chat model"
        )
    return Conversion(config, converts=True)


def pair_template(
    folder: Path, made: Conversion, instruction: str | None, variables: Mapping[str, Any], *, listed: bool
) -> PairTemplate | None:
    """The template for pairs that a reranker was trained with; None: it reads two texts as they are.

    `variables` are those of its chat template. Raises ModelError if it must have one that is not there.
    """
    config = made.config
    if decoder_of(str(config["architectures"][0])) is None or not made.classifies:
        return None
    for template in chat_templates(folder):
        if has_pair_roles(template):
            try:
                return read_template(template, {**special_texts(folder), **variables}, instruction)
            except ModelError as error:
                raise ModelError(f"{folder}: {error}") from error
    if _is_named_reranker(folder, config) or config.get("is_original_qwen3_reranker"):
        return qwen3_template(instruction)
    if made.answer is not None and listed:
        raise ModelError(
            f"{folder} is a reranker that answers with a token, but it has no chat template with the roles query and "
            "document: put one into chat_template.jinja"
        )
    return None


def _answer(folder: Path, config: Mapping[str, Any], *, is_reranker: bool) -> AnswerTokens | None:
    """The two answers that `classifier_from_token` of a config names, as in vLLM: the false one, then the true one."""
    named = config.get("classifier_from_token") or (list(_QWEN3_TOKENS) if is_reranker else None)
    if named is None:
        return None
    if not (isinstance(named, list) and len(named) == 2 and all(isinstance(token, str) for token in named)):
        raise ModelError(
            f"{folder}: classifier_from_token must be two tokens, the false answer and the true one, got {shown(named)}"
        )
    path = folder / "tokenizer.json"
    require_file(path, MAX_TOKENIZER_BYTES)
    with reading_tokenizer(path):
        vocabulary = tokenizers.Tokenizer.from_file(str(path))
    false, true = map(vocabulary.token_to_id, named)
    if false is None or true is None:
        raise ModelError(f"{path} does not have both tokens of classifier_from_token, {shown(named)}")
    return AnswerTokens(true, false)


def _is_named_reranker(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a Qwen3 has the name of a reranker. Its first checkpoints do not say in any other way what they are."""
    names: Iterable[object] = (config.get("_name_or_path"), folder.resolve())
    return config.get("model_type") == "qwen3" and any(_QWEN3_RERANKER in str(name).lower() for name in names)
