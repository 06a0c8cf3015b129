"""The `llm` command and its Python API, with the model in a file of its own as its documentation has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import HELLO, INVENT, MODEL, QUESTION, Wheel, get_weather, main

FILE = """- model_id: demo
  model_name: {model}
  api_base: {url}/v1
  supports_tools: true
  supports_schema: true
"""


def scenario(url: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "extra-openai-models.yaml").write_text(FILE.format(model=MODEL, url=url))
        os.environ |= {"LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
        return _scenario()


def _scenario() -> dict[str, Any]:
    import llm  # reads the environment

    def run(*arguments: str) -> str:
        command = [str(Path(sys.executable).with_name("llm")), "-m", "demo", "-o", "temperature", "0", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.removesuffix("\n")

    asked: list[dict[str, Any]] = []
    chain = llm.get_model("demo").chain(
        QUESTION,
        tools=[get_weather],
        options={"temperature": 0},
        after_call=lambda tool, call, result: asked.append(call.arguments),
    )
    answer = chain.text()
    return {
        "called": asked[0],
        "answer": answer,
        "whole": run("--no-stream", HELLO),
        "streamed": run(HELLO),
        "structured": Wheel.model_validate_json(run("--schema", json.dumps(Wheel.model_json_schema()), INVENT)),
    }


main(scenario)
