"""mem0: memories that are kept and found by their vectors, in a store in memory."""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ["MEM0_TELEMETRY"] = "False"
os.environ["MEM0_DIR"] = tempfile.mkdtemp()

from common import DOCUMENTS, QUERY, main
from mem0 import Memory


def scenario(url: str) -> dict[str, Any]:
    of_openai = {"openai_base_url": f"{url}/v1", "api_key": "none"}
    embedder = {**of_openai, "model": "embed", "embedding_dims": 32}
    with tempfile.TemporaryDirectory() as folder:
        store = {"path": folder, "embedding_model_dims": 32, "on_disk": False}
        memory = Memory.from_config(
            {
                "llm": {"provider": "openai", "config": {**of_openai, "model": "scripted"}},
                "embedder": {"provider": "openai", "config": embedder},
                "vector_store": {"provider": "qdrant", "config": store},
            }
        )
        for text in DOCUMENTS:
            memory.add(text, user_id="miller", infer=False)
        found = memory.search(QUERY, filters={"user_id": "miller"}, threshold=0.0)["results"]
        return {
            "vectors": {"openai": [memory.embedding_model.embed(text, "add") for text in DOCUMENTS]},
            "orders": {},
            "found": [DOCUMENTS.index(one["memory"]) for one in found],
        }


main(scenario)
