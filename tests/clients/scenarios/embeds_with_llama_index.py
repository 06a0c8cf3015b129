"""LlamaIndex: embeddings as from OpenAI and from Text Embeddings Inference."""

from __future__ import annotations

from typing import Any

from common import DOCUMENTS, main
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference


def scenario(url: str) -> dict[str, Any]:
    of_openai = OpenAILikeEmbedding(model_name="embed", api_base=f"{url}/v1", api_key="none", max_retries=0)
    of_tei = TextEmbeddingsInference(model_name="embed", base_url=url)
    return {
        "vectors": {
            "openai": of_openai.get_text_embedding_batch(DOCUMENTS),
            "tei": of_tei.get_text_embedding_batch(DOCUMENTS),
        },
        "orders": {},
    }


main(scenario)
