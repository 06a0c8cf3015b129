"""A sentencepiece model's vocabulary in a GGUF file, as llama.cpp's converter writes it."""

from __future__ import annotations

from pathlib import Path

import gguf
import gguf_files


def write(
    path: Path,
    model: bytes,
    user_defined: tuple[str, ...] = (),
    filling: gguf.TokenType = gguf.TokenType.UNUSED,
    *,
    prefix: bool = True,
    extra: bool = False,
) -> Path:
    """Without weights, and filled up with two tokens of a type.

    The model adds a space before texts with `prefix`, and removes spaces with `extra`.
    """
    import sentencepiece  # some processors have no wheels of it

    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(pieces.GetPieceSize())
    kinds = [
        gguf.TokenType.UNKNOWN if pieces.IsUnknown(i) else gguf.TokenType.CONTROL if pieces.IsControl(i)
        else gguf.TokenType.BYTE if pieces.IsByte(i) else gguf.TokenType.NORMAL for i in ids
    ]  # fmt: skip
    for text in user_defined:
        kinds[pieces.PieceToId(text)] = gguf.TokenType.USER_DEFINED
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    # Files fill their vocabulary up to the embedding's size.
    writer.add_token_list([pieces.IdToPiece(i) for i in ids] + ["[PAD500]", "[PAD501]"])
    writer.add_token_scores([pieces.GetScore(i) for i in ids] + [-1000.0] * 2)
    if filling is gguf.TokenType.UNKNOWN:  # as in early files, where Phi-3's <unk> has another type
        kinds[pieces.unk_id()] = gguf.TokenType.CONTROL
    writer.add_token_types([*kinds, filling, filling])
    writer.add_bos_token_id(pieces.bos_id())
    writer.add_eos_token_id(pieces.eos_id())
    writer.add_unk_token_id(pieces.unk_id())
    writer.add_add_space_prefix(prefix)
    writer.add_remove_extra_whitespaces(extra)
    return gguf_files.finish(writer)
