"""The libraries that read a tokenizer's files: tokenizers, sentencepiece, and as a last resort transformers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import tokenizers

from ..errors import ModelError
from ..files.wording import one_line
from ..install_hint import install_command
from .piece_texts import FirstSpaces, PieceTexts

# Calls for batches are what lets other threads run meanwhile. Here a batch is one text, for which the library must not
# start threads of its own beside the engine's. It looks at this variable with each call.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shorter text takes less time than it may take to get the interpreter's lock back.
LONG_TEXT = 4096
"""In characters."""
_LONG_IDS = 1024  # tokens
_SEARCH_STEP = 4096  # characters
_PIECES_AT_ONCE = 4096


class TokenizerBackend(Protocol):
    """Text to ids and back. `token_bytes` is set if tokens are byte strings, independent of their neighbours."""

    vocab_size: int
    token_bytes: Callable[[int], bytes] | None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def id_to_token(self, token_id: int) -> str | None: ...

    def token_to_id(self, token: str) -> int | None: ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token marks structure, and has no text when special tokens are skipped."""
        ...

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte, which has text only together with its neighbours."""
        ...


@contextmanager
def reading_tokenizer(path: Path) -> Iterator[None]:
    """Turns every error of the tokenizers library about a bad `tokenizer.json` into a ModelError.

    Some errors appear only when a text is encoded.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, ModelError):
        raise
    except BaseException as error:  # the library raises no narrower type, and its panics are not even Exceptions
        raise ModelError(f"{path} is not a tokenizer that can be used: {one_line(error)}") from error


def raise_panic(error: BaseException) -> None:
    """Raise a panic of the library, which is not an Exception, as one. So it fails only one request."""
    if not isinstance(error, Exception | KeyboardInterrupt | SystemExit):
        raise RuntimeError(f"the tokenizers library failed: {error}") from error


def encoding_of(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
    """`tokenizer.encode` without offsets, which lets other threads run while a long text is encoded."""
    if len(text) <= LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


class TokenizersBackend:
    """A `tokenizer.json`, by the tokenizers library."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        is_byte_level = isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel)
        self.token_bytes: Callable[[int], bytes] | None = self._token_bytes if is_byte_level else None

    @property
    def decoder(self) -> str:
        """What makes a text of tokens, as JSON: see `decoder_of`."""
        return state_of(self._tokenizer.decoder)

    @classmethod
    def load(cls, path: Path) -> TokenizersBackend:
        """Read a `tokenizer.json`. Raises ModelError if it is not one."""
        with reading_tokenizer(path):
            made = cls(tokenizers.Tokenizer.from_file(str(path)))
            made.decode(made.encode("a", add_special_tokens=True), skip_special_tokens=False)
            return made

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """See TokenizerBackend."""
        try:
            ids: list[int] = encoding_of(self._tokenizer, text, add_special_tokens).ids
        except BaseException as error:
            raise_panic(error)
            raise
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """See TokenizerBackend."""
        try:
            if len(ids) > _LONG_IDS:
                texts: list[str] = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
                return texts[0]
            text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise_panic(error)
            raise
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """See TokenizerBackend."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        """See TokenizerBackend."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def is_special(self, token_id: int) -> bool:
        """See TokenizerBackend."""
        return token_id in self._special

    def is_byte(self, token_id: int) -> bool:
        """See TokenizerBackend."""
        return is_byte_token(self.id_to_token(token_id))

    def _token_bytes(self, token_id: int) -> bytes:
        return byte_level_bytes(self.id_to_token(token_id) or "")


def decoder_of(state: str) -> tokenizers.decoders.Decoder | None:
    """The library's decoder, without the rest of its tokenizer, of what TokenizersBackend says."""
    decoder: tokenizers.decoders.Decoder | None = without_vocabulary("decoder", state).decoder
    return decoder


def without_vocabulary(part: str, state: str) -> tokenizers.Tokenizer:
    """A tokenizer of the library that has this part alone, of which `state` is the JSON."""
    empty = msgspec.json.decode(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    return tokenizers.Tokenizer.from_str(msgspec.json.encode(empty | {part: msgspec.json.decode(state)}).decode())


def state_of(part: Any) -> str:
    """The JSON of a part of the library's tokenizers, which may be None."""
    return "null" if part is None else bytes(part.__getstate__()).decode()


class SentencePieceBackend:
    """A `tokenizer.model`, by the sentencepiece library, with the tokens that `tokenizer_config.json` adds."""

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        model: bytes | None = None,
        first_spaces: FirstSpaces | None = None,
    ) -> None:
        """`model` is the content of a `tokenizer.model` that was made of another file, which `path` names then.

        With `first_spaces`, this and the tokens alone decide their texts, and `config` adds all that are no text. The
        entries of `added_tokens_decoder` in `config` have been checked. Raises ModelError if the file is not a
        sentencepiece model, or if the library is missing.
        """
        try:
            import sentencepiece
        except ModuleNotFoundError as error:
            raise ModelError(
                f"{path.parent} has no tokenizer.json, and to read its {path.name} needs sentencepiece, which is not "
                "installed: pip install sentencepiece (some processors have no wheels of it), or add a tokenizer.json, "
                "which transformers writes elsewhere: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            ) from error

        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            if model is None:
                self._processor.Load(str(path))
            else:
                self._processor.LoadFromSerializedProto(model)
            size: int = self._processor.GetPieceSize()
            # All of them, because each access to a piece that is not UTF-8 raises; some at a time, because no other
            # thread can run meanwhile.
            self._pieces = list[str]()
            for start in range(0, size, _PIECES_AT_ONCE):
                ids = list(range(start, min(start + _PIECES_AT_ONCE, size)))
                self._pieces += self._processor.IdToPiece(ids)
                self._processor.DecodeIds(ids)
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{path} is not a sentencepiece model: {one_line(error)}") from error
        self.token_bytes: Callable[[int], bytes] | None = None
        self._size = size
        added = {int(i): token for i, token in (config.get("added_tokens_decoder") or {}).items()}
        self._added = {i: str(token["content"]) for i, token in added.items()}
        self._added_special = {i for i, token in added.items() if token.get("special", False)}
        self._added_ids = {content: i for i, content in self._added.items()}
        self.vocab_size = max([self._size, *(i + 1 for i in self._added)])
        longest_first = sorted(self._added_ids, key=len, reverse=True)
        self._longest_added = len(longest_first[0]) if longest_first else 0
        self._any_added = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        bos, eos = self._processor.bos_id(), self._processor.eos_id()
        self._prefix = [bos] if bos >= 0 and config.get("add_bos_token", True) else []
        self._suffix = [eos] if eos >= 0 and config.get("add_eos_token", False) else []
        self.texts = None if first_spaces is None else PieceTexts(frozenset(self._added), first_spaces)
        """How to decode without the library; None if that cannot be."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """See TokenizerBackend."""
        ids: list[int] = []
        for part in self._parts(text):
            if part in self._added_ids:
                ids.append(self._added_ids[part])
            elif part:
                ids += self._processor.EncodeAsIds(part)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def _parts(self, text: str) -> Iterator[str]:
        """The added tokens in a text, and the parts between them."""
        done = start = 0
        # In steps, because no other thread can run during a search.
        while self._any_added is not None and start < len(text):
            found = self._any_added.search(text, start, start + _SEARCH_STEP + self._longest_added)
            if found is None or found.start() >= start + _SEARCH_STEP:
                start += _SEARCH_STEP
                continue
            yield text[done : found.start()]
            yield found.group()
            done = start = found.end()
        yield text[done:]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """See TokenizerBackend."""
        text, run = "", list[int]()
        for token_id in ids:
            if token_id in self._added or self.is_special(token_id) or token_id >= self._size:
                if skip_special_tokens and self.is_special(token_id):
                    continue
                text += self._processor.DecodeIds(run) + (self.id_to_token(token_id) or "")
                run = []
            else:
                run.append(token_id)
        return text + str(self._processor.DecodeIds(run))

    def id_to_token(self, token_id: int) -> str | None:
        """See TokenizerBackend."""
        if token_id in self._added:
            return self._added[token_id]
        return self._pieces[token_id] if 0 <= token_id < self._size else None

    def token_to_id(self, token: str) -> int | None:
        """See TokenizerBackend."""
        if token in self._added_ids:
            return self._added_ids[token]
        token_id: int = self._processor.PieceToId(token)
        return token_id if self.id_to_token(token_id) == token else None

    def is_special(self, token_id: int) -> bool:
        """See TokenizerBackend."""
        return token_id in self._added_special or (token_id < self._size and self._processor.IsControl(token_id))

    def is_byte(self, token_id: int) -> bool:
        """See TokenizerBackend."""
        return token_id < self._size and bool(self._processor.IsByte(token_id))


class TransformersBackend:
    """Transformers' tokenizer for a folder without either of the files above."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.token_bytes: Callable[[int], bytes] | None = None
        self._special = set(tokenizer.all_special_ids)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """See TokenizerBackend."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """See TokenizerBackend."""
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def id_to_token(self, token_id: int) -> str | None:
        """See TokenizerBackend."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return token if isinstance(token, str) else None

    def token_to_id(self, token: str) -> int | None:
        """See TokenizerBackend."""
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        return token_id if isinstance(token_id, int) else None

    def is_special(self, token_id: int) -> bool:
        """See TokenizerBackend."""
        return token_id in self._special

    def is_byte(self, token_id: int) -> bool:
        """See TokenizerBackend."""
        return is_byte_token(self.id_to_token(token_id))


def load_with_transformers(folder: Path) -> TokenizerBackend:
    """Ask transformers, which is imported only here. Raises ModelError if it fails too, or is not installed."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModelError(
            f"{folder} has neither tokenizer.json nor tokenizer.model, and to read its other files needs {error.name}, "
            f"which is not installed: {install_command('transformers')}, or build the image with "
            "--build-arg EXTRAS=transformers, or add a tokenizer.json"
        ) from error

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # anything may go wrong inside
        raise ModelError(f"transformers cannot make a tokenizer of the files in {folder}: {one_line(error)}") from error
    inner = getattr(tokenizer, "backend_tokenizer", None)
    return TransformersBackend(tokenizer) if inner is None else TokenizersBackend(inner)


def is_byte_token(token: str | None) -> bool:
    """Whether a token is one byte, as in vocabularies that have a token for each."""
    return token is not None and _BYTE_TOKEN.fullmatch(token) is not None


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level vocabulary's token."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # an added token, which is stored as plain text
        return token.encode()


_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: itself where printable, else the next one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()
CHARACTER_OF_BYTE = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}
