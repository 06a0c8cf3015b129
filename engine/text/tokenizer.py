"""Tokenizer: a model folder's tokenizer, and everything that its files say about text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import ModelError
from ..files.folder import read_json_if_there
from ..files.reading import (
    MAX_TEMPLATE_BYTES,
    MAX_TOKENIZER_BYTES,
    is_there,
    read_file,
    require_file,
)
from ..files.wording import shown
from .detokenizer import BytesDetokenizer, Detokenizer, WindowDetokenizer
from .tokenizer_backends import TokenizerBackend, TokenizersBackend

_CONTEXT_TOKENS = 8  # of the prompt, for the first piece of output

SpecialTokens = Mapping[str, str | list[str]]
ChatTemplate = str | dict[str, str]


class ChatEncoder(Protocol):
    """Encodes conversations itself, in place of a chat template: what a message says stays text."""

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final_message: bool = False,
        reasoning_effort: str | None = None,
    ) -> list[int]:
        """The token ids of a prompt. Raises InvalidRequestError for what cannot be said in this format.

        Messages and tools are as OpenAI's API has them, with contents of text, and calls' arguments as JSON.
        """
        ...


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads.

    `special_tokens_map` gives the names that templates use (`bos_token`, `eos_token`, ...) their tokens.
    `chat_template` is one template or several by name, None if the folder has none. `class_name` names transformers'
    class, empty if the folder names none. `chat` encodes conversations where no template does. Only a NoTokenizer has
    no text.
    """

    has_text = True
    is_lent = False
    """Whether another process has made it: see LentTokenizer."""

    def __init__(
        self,
        backend: TokenizerBackend,
        special_tokens_map: SpecialTokens | None = None,
        chat_template: ChatTemplate | None = None,
        class_name: str = "",
        chat: ChatEncoder | None = None,
    ) -> None:
        self.backend = backend
        self.class_name = class_name
        self.vocab_size = backend.vocab_size
        self.special_tokens_map: SpecialTokens = special_tokens_map or {}
        self.chat_template = chat_template
        self.chat = chat
        self._texts: dict[tuple[bool, frozenset[int]], dict[int, str]] = {}  # one for each set of skipped tokens

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer in a model folder. Raises ModelError if there is none or it is broken."""
        config = read_json_if_there(folder / "tokenizer_config.json")
        name = config.get("tokenizer_class")
        return cls(
            _backend(folder, config),
            _special_tokens(folder, config),
            _chat_template(folder, config),
            name if isinstance(name, str) else "",
        )

    @property
    def bos_token(self) -> str | None:
        """The beginning-of-sequence token, if the folder names one."""
        return self._special("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The end-of-sequence token, if the folder names one."""
        return self._special("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token`."""
        return None if self.eos_token is None else self.backend.token_to_id(self.eos_token)

    def settle(self) -> None:
        """Make it in this process, if it is lent."""

    def require_text(self, param: str) -> None:
        """Raises InvalidRequestError naming `param`, which needs text, if the tokenizer has no text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, on request with the special tokens that the tokenizer puts around a text."""
        return self.backend.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""
        return self.backend.decode(ids, skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None if there is no such id."""
        return self.backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it; None if there is no such token."""
        return self.backend.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """Whether the token has no text when special tokens are skipped."""
        return self.backend.is_special(token_id)

    def special_ids(self) -> dict[str, int]:
        """The tokens that mark structure, by their names."""
        ids = (i for i in range(self.vocab_size) if self.backend.is_special(i))
        return {name: i for i in ids if (name := self.backend.id_to_token(i))}

    def token_texts(self, token_ids: Iterable[int] | None = None) -> list[bytes | None]:
        """The bytes that each token adds to a text: None for tokens that mark structure, b"" for tokens without text.

        The default is all tokens, which takes a while for a large vocabulary.
        """
        backend, texts = self.backend, list[bytes | None]()
        before = self.encode("a", add_special_tokens=False)  # some spaces appear only within a text
        num_before = len(self.decode(before))
        for token_id in range(self.vocab_size) if token_ids is None else token_ids:
            if backend.is_special(token_id):
                texts.append(None)
            elif backend.id_to_token(token_id) is None:
                texts.append(b"")
            elif backend.token_bytes is not None:
                texts.append(backend.token_bytes(token_id))
            elif backend.is_byte(token_id):
                texts.append(bytes([int((backend.id_to_token(token_id) or "")[3:5], 16)]))
            else:
                text = self.decode([*before, token_id])[num_before:]
                texts.append(b"" if "\ufffd" in text else text.encode())  # a part of a character
        return texts

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text. For a token that marks structure, the bytes of its name."""
        (text,) = self.token_texts([token_id])
        return (self.id_to_token(token_id) or "").encode() if text is None else text

    def detokenizer(
        self,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        """An incremental detokenizer for what follows `prompt`. `shown` are special tokens that are never skipped.

        Without `spaces_between_special_tokens`, special tokens that are shown follow each other without the space
        that some tokenizers put there.
        """
        backend = self.backend
        texts = self._texts.setdefault((skip_special_tokens, frozenset(shown)), {})
        is_special = backend.is_special if skip_special_tokens else _never
        if shown and skip_special_tokens:

            def is_special(token_id: int) -> bool:
                return token_id not in shown and backend.is_special(token_id)

            skip_special_tokens = False  # the backend skips them before they get here
        if backend.token_bytes is not None:
            return BytesDetokenizer(backend.token_bytes, is_special, texts)
        return WindowDetokenizer(
            lambda ids: backend.decode(ids, skip_special_tokens),
            lambda token: is_special(token) or backend.id_to_token(token) is None,
            backend.is_byte,
            prompt[max(len(prompt) - _CONTEXT_TOKENS, 0) :],
            None if skip_special_tokens or spaces_between_special_tokens else self._special_text,
        )

    def _special_text(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id) if self.backend.is_special(token_id) else None

    def _special(self, name: str) -> str | None:
        token = self.special_tokens_map.get(name)
        return token if isinstance(token, str) else None


def _never(token_id: int) -> bool:
    return False


def _backend(folder: Path, config: Mapping[str, Any]) -> TokenizerBackend:
    if is_there(path := folder / "tokenizer.json"):
        require_file(path, MAX_TOKENIZER_BYTES)
        return TokenizersBackend.load(path)
    from .other_files import load_other_files  # which most models do not need

    return load_other_files(folder, config)


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str | list[str]]:
    tokens: dict[str, str | list[str]] = {}
    for source in (read_json_if_there(folder / "special_tokens_map.json"), config):
        for name, value in source.items():
            if name.endswith("_token") and (text := _token_text(value)) is not None:
                tokens[name] = text
            elif name == "additional_special_tokens" and isinstance(value, list):
                tokens[name] = [text for text in map(_token_text, value) if text is not None]
    return tokens


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def chat_templates(folder: Path) -> list[str]:
    """All chat templates of a model folder. Raises ModelError for files that are broken."""
    found = _chat_template(folder, read_json_if_there(folder / "tokenizer_config.json"))
    return [found] if isinstance(found, str) else [*(found or {}).values()]


def _chat_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The chat templates. Files of their own win over the configs, as in transformers."""
    templates = _listed(config, folder / "tokenizer_config.json")
    # Models that read images have a template beside the processor. It goes before the tokenizer's.
    for name in ("processor_config.json", "chat_template.json"):
        templates |= _listed(read_json_if_there(folder / name), folder / name)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    single = folder / "chat_template.jinja"
    if is_there(single):
        templates["default"] = _read_text(single)
    for name, text in templates.items():
        if len(text) > MAX_TEMPLATE_BYTES:
            raise ModelError(f"{folder}: the chat template {shown(name)} has more than {MAX_TEMPLATE_BYTES} characters")
    return templates.get("default") if set(templates) <= {"default"} else templates


def _listed(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """The templates in `config`, which `path` holds: one, a list of them, or an object of them, each with its name."""
    given = config.get("chat_template")
    if given is None or isinstance(given, str):
        return {} if given is None else {"default": given}
    if isinstance(given, dict):
        given = [{"name": name, "template": text} for name, text in given.items()]
    templates: dict[str, str] = {}
    for entry in given if isinstance(given, list) else [None]:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ModelError(f"{path}: chat_template must be a template, or a list of objects of name and template")
        templates[name] = text
    return templates


def _read_text(path: Path) -> str:
    try:
        return read_file(path, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
