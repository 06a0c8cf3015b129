"""PairTemplate: the text that a reranker made from a chat model reads a query and a document in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ..errors import ModelError

_JUDGE = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
_COMMAND = "import sys; sys.path[:] = sys.argv[1:]; from tidewheel.engine.encoders.template_process import main; main()"
_CPU_S = 5  # also for the imports
_ALL_S = 60.0  # on a slow machine
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class PairTemplate(Struct, frozen=True):
    """`before`, a query, `between`, a document, `after`. The last begins where a token does."""

    before: str
    between: str
    after: str


def has_pair_roles(template: str) -> bool:
    """Whether a chat template has messages of a query and a document, as sentence-transformers and vLLM write them."""
    return all(re.search(f"""["']{role}["']""", template) for role in ("query", "document"))


def read_template(source: str, variables: Mapping[str, Any], instruction: str | None) -> PairTemplate:
    """What a chat template writes around a query and a document, behind an instruction in a system message.

    It is rendered once, in a process of its own. Raises ModelError for a template that does not write both.
    """
    marks = ("\ue000", "\ue001")  # which no template has
    complaint = "it does not write the messages of a query and a document, once each and in this order"
    for structured in (False, True):
        said = {"system": instruction, "query": marks[0], "document": marks[1]}
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if structured else text}
            for role, text in said.items()
            if text is not None
        ]
        text = _rendered(source, {**variables, "messages": messages})
        parts = re.split(f"({'|'.join(marks)})", text)
        if parts[1::2] == [*marks] and parts[-1]:
            return PairTemplate(*parts[::2])
    raise ModelError(f"the chat template cannot be used for reranking: {complaint}")


def _rendered(source: str, variables: Mapping[str, Any]) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _COMMAND, *sys.path],
            input=json.dumps({"template": source, "variables": variables, "seconds": _CPU_S}),
            capture_output=True,
            text=True,
            timeout=_ALL_S,
            env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
        )
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ModelError("the chat template could not be rendered: it may take too much time or memory") from error
    if "error" in answer:
        raise ModelError(f"the chat template cannot be used for reranking: {answer['error']}")
    return str(answer["text"])


def qwen3_template(instruction: str | None = None) -> PairTemplate:
    """Qwen3-Reranker's, with its default instruction or another one. The answer comes behind an empty thought."""
    return PairTemplate(
        f'<|im_start|>system\n{_JUDGE} Note that the answer can only be "yes" or "no".<|im_end|>\n'
        f"<|im_start|>user\n<Instruct>: {instruction or _QWEN3_INSTRUCTION}\n<Query>: ",
        "\n<Document>: ",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    )
