"""Cohere's client, the present one and the one of its first version."""

from __future__ import annotations

from typing import Any

import cohere
from common import DOCUMENTS, QUERY, main


def scenario(url: str) -> dict[str, Any]:
    client = cohere.ClientV2(api_key="none", base_url=url)
    embedded = client.embed(
        model="embed", texts=DOCUMENTS, input_type="search_document", embedding_types=["float", "ubinary"]
    )
    first = cohere.Client(api_key="none", base_url=url)
    ranked = client.rerank(model="rank", query=QUERY, documents=DOCUMENTS, top_n=2, max_tokens_per_doc=100)
    old = first.rerank(model="rank", query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=True)
    return {
        "vectors": {
            "typed": embedded.embeddings.float_,
            "old": first.embed(model="embed", texts=DOCUMENTS, input_type="search_document").embeddings,
        },
        "bits": embedded.embeddings.ubinary,
        "orders": {
            "new": [result.index for result in ranked.results],
            "old": [DOCUMENTS.index(result.document.text) for result in old.results],
        },
    }


main(scenario)
