"""How families of encoders compute, one file each: `model`, from a model's config to its EncoderModel."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, cast

from ...models.config import ConfigReader
from ..model import AnswerTokens, EncoderModel

__all__ = ["COLBERT", "FAMILIES", "encoder_model"]

PREDICTS_WORDS = "ForMaskedLM"
COLBERT = "HF_ColBERT"


class _Family(Protocol):
    """What the module of a family has."""

    def model(self, architecture: str, config: ConfigReader) -> EncoderModel:
        """The encoder of one of its architectures."""
        ...


def encoder_model(
    config: Mapping[str, Any],
    *,
    converts: bool = False,
    answer: AnswerTokens | None = None,
    predicts_words: bool = False,
) -> EncoderModel | None:
    """The encoder of a config.json; None if its architecture has none here.

    A decoder that generates text is one only if it `converts`, or for a reranker whose scores are its `answer`. The
    head of a masked language model is a part of it only if it `predicts_words`. Raises ModelError, naming the field,
    for what is not supported.
    """
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str):
        return None
    if name not in FAMILIES:
        from . import decoder

        found = decoder.decoder_of(name)
        if found is None or (found.use == "generates" and not converts and answer is None):
            return None
        return decoder.model(name, ConfigReader(config), answer)
    family = cast(_Family, import_module(f".{FAMILIES[name]}", __package__))
    if name.endswith(PREDICTS_WORDS) and not predicts_words:
        name = f"{name.removesuffix(PREDICTS_WORDS)}Model"
    return family.model(name, ConfigReader(config))


# By architecture, the module that describes it. It is imported when a model has that architecture.
FAMILIES: Mapping[str, str] = {
    "BertForMaskedLM": "bert",
    "BertForSequenceClassification": "bert",
    "BertForTokenClassification": "bert",
    "BertModel": "bert",
    "CamembertForMaskedLM": "roberta",
    "CamembertForSequenceClassification": "roberta",
    "CamembertForTokenClassification": "roberta",
    "CamembertModel": "roberta",
    "DebertaForMaskedLM": "deberta",
    "DebertaForSequenceClassification": "deberta",
    "DebertaForTokenClassification": "deberta",
    "DebertaModel": "deberta",
    "DebertaV2ForMaskedLM": "deberta",
    "DebertaV2ForSequenceClassification": "deberta",
    "DebertaV2ForTokenClassification": "deberta",
    "DebertaV2Model": "deberta",
    "DistilBertForMaskedLM": "distilbert",
    "DistilBertForSequenceClassification": "distilbert",
    "DistilBertForTokenClassification": "distilbert",
    "DistilBertModel": "distilbert",
    "Gemma3TextModel": "gemma3",
    "GteForSequenceClassification": "gte",
    "GteForTokenClassification": "gte",
    "GteModel": "gte",
    COLBERT: "bert",
    "JinaBertForMaskedLM": "jina_bert",
    "JinaBertModel": "jina_bert",
    "ModernBertForMaskedLM": "modernbert",
    "ModernBertForSequenceClassification": "modernbert",
    "ModernBertForTokenClassification": "modernbert",
    "ModernBertModel": "modernbert",
    "MPNetForMaskedLM": "mpnet",
    "MPNetForSequenceClassification": "mpnet",
    "MPNetForTokenClassification": "mpnet",
    "MPNetModel": "mpnet",
    "NewForSequenceClassification": "gte",
    "NewForTokenClassification": "gte",
    "NewModel": "gte",
    "NomicBertModel": "nomic_bert",
    "RobertaForMaskedLM": "roberta",
    "RobertaForSequenceClassification": "roberta",
    "RobertaForTokenClassification": "roberta",
    "RobertaModel": "roberta",
    "XLMRobertaForMaskedLM": "roberta",
    "XLMRobertaForSequenceClassification": "roberta",
    "XLMRobertaForTokenClassification": "roberta",
    "XLMRobertaModel": "roberta",
}
