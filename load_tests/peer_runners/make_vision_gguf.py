"""Writes a checkpoint that sees images as GGUF, with the converter of llama.cpp's sources: its text part or projector.

usage: make_vision_gguf.py SOURCES MODEL FORMAT.gguf
       make_vision_gguf.py SOURCES MODEL mmproj-FORMAT.gguf

FORMAT is BF16, F16, F32 or Q8_0. Needs torch and transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

_PROJECTOR = "mmproj-"


def main() -> None:
    """Write the file."""
    sources, model, target = map(Path, sys.argv[1:])
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    import convert_hf_to_gguf as converter  # type: ignore[import-not-found, unused-ignore]
    from conversion import base  # type: ignore[import-not-found, unused-ignore]

    base.TextModel.get_vocab_base_pre = _pre_tokenizer
    of_tower = base.MmprojModel.filter_tensors.__func__
    base.MmprojModel.filter_tensors = classmethod(lambda cls, tensor: of_tower(cls, (_published(tensor[0]), tensor[1])))
    is_projector = target.stem.startswith(_PROJECTOR)
    part = target.with_suffix(".part")
    sys.argv = [
        "convert_hf_to_gguf.py", str(model), "--outfile", str(part),
        "--outtype", target.stem.removeprefix(_PROJECTOR).lower(), *(["--mmproj"] if is_projector else []),
    ]  # fmt: skip
    converter.main()
    written = part.with_name(f"{_PROJECTOR}{part.name}")  # some versions put this before the name
    (written if written.exists() else part).rename(target)


def _published(name: str) -> str:
    """The name that the converter knows. Newer versions of transformers write SigLIP's without its middle."""
    tower, inner = "vision_tower.", "vision_model."
    is_short = name.startswith(tower) and not name.startswith(tower + inner)
    return tower + inner + name.removeprefix(tower) if is_short else name


def _pre_tokenizer(self: Any, tokenizer: Any) -> str:
    """The converter knows those of published models. Ours has GPT-2's, and no model of its own."""
    return "gpt-2"


if __name__ == "__main__":
    main()
