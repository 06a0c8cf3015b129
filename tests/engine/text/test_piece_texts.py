"""PieceTexts: without sentencepiece's library, the same texts."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidewheel.engine.text.piece_texts import PieceTexts, first_spaces

sentencepiece = pytest.importorskip("sentencepiece")

PIECES = ["▁", "▁▁", "▁▁▁a", "▁a", "a", "a▁", "▁▁a▁", "車", "<0x4>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Of whole characters, of parts of them, and of what is none.
SOME_BYTES = [*"▁車é😀a ".encode(), *b"\x00\x80\xbf\xc0\xe2\xed\xa0\xef\xbf\xbe\xf0\xf4\x90\xff"]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("extra", [True, False])
def test_texts_are_as_the_library_makes_them(prefix: bool, extra: bool) -> None:
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.trainer_spec.model_type = 2
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.add_dummy_prefix = prefix
    model.normalizer_spec.remove_extra_whitespaces = extra
    tokens = ["<unk>", *BYTES, *PIECES]
    for i, piece in enumerate(tokens):
        model.pieces.add(piece=piece, score=-float(i), type=2 if not i else 6 if i <= len(BYTES) else 4 if i % 3 else 1)
    library = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    ours, byte_ids = PieceTexts(frozenset([0]), first_spaces(prefix, extra)), range(1, len(BYTES) + 1)
    ids = st.sampled_from(SOME_BYTES).map(lambda byte: byte + 1) | st.integers(len(BYTES) + 1, len(tokens) - 1)

    @given(st.lists(st.lists(ids, max_size=12), min_size=1, max_size=3))
    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    def check(parts: list[list[int]]) -> None:
        joined = [token_id for part in parts for token_id in [0, *part]][1:]
        assert ours.text(tokens, byte_ids, joined) == "<unk>".join(library.DecodeIds(part) for part in parts)

    check()
