"""LiteLLM: embeddings and rankings, as it asks vLLM, OpenAI, Cohere and Jina."""

from __future__ import annotations

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or its import waits for a download

import litellm
from common import DOCUMENTS, QUERY, main


def scenario(url: str) -> dict[str, Any]:
    def embed(provider: str) -> list[list[float]]:
        answer = litellm.embedding(model=f"{provider}/embed", input=DOCUMENTS, api_base=f"{url}/v1", api_key="none")
        return [item["embedding"] for item in answer.data]

    def rank(provider: str, base: str) -> list[int]:
        answer = litellm.rerank(
            model=f"{provider}/rank", query=QUERY, documents=DOCUMENTS, top_n=2, api_base=base, api_key="none"
        )
        return [result["index"] for result in answer.results]

    return {
        "vectors": {provider: embed(provider) for provider in ("hosted_vllm", "openai")},
        "orders": {
            "hosted_vllm": rank("hosted_vllm", url),
            "cohere": rank("cohere", url),
            "jina_ai": rank("jina_ai", url),
        },
    }


main(scenario)
