"""`--tokenizer-mode mistral`: Mistral's own tokenizer files and chat formats, by the mistral-common library.

Its chat formats are no templates: they give token ids, so a text of a message can never become a token that marks
structure. https://github.com/mistralai/mistral-common
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidRequestError, ModelError
from ..files.reading import MAX_TOKENIZER_BYTES, is_there, require_file
from ..files.wording import one_line
from ..install_hint import install_command
from .tokenizer import Tokenizer
from .tokenizer_backends import raise_panic

_TEKKEN = "tekken.json"
_SENTENCEPIECE = re.compile(r"tokenizer\.model\.v\d+(m\d+)?")
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_ID = re.compile("[^0-9A-Za-z]")
_ID_LENGTH = 9  # letters and digits, which the library insists on


def mistral_file(folder: Path) -> Path | None:
    """The file in a model folder that mistral-common reads: the tekken one, else the newest of sentencepiece."""
    if is_there(folder / _TEKKEN):
        return folder / _TEKKEN
    try:
        found = [path for path in folder.iterdir() if _SENTENCEPIECE.fullmatch(path.name)]
    except OSError:
        return None
    return max(found, key=lambda path: _version(path.name), default=None)


def load_mistral(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises ModelError if it has no such file, or mistral-common is missing."""
    path = mistral_file(folder)
    if path is None:
        raise ModelError(
            f"{folder} has neither {_TEKKEN} nor tokenizer.model.v3, which --tokenizer-mode mistral reads: leave that "
            "option out, or name another folder with --tokenizer"
        )
    require_file(path, MAX_TOKENIZER_BYTES)
    try:
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
    except ModuleNotFoundError as error:
        raise ModelError(
            f"--tokenizer-mode mistral needs {error.name}, which is not installed: {install_command('mistral')}"
        ) from error
    logging.getLogger("mistral_common").setLevel(logging.WARNING)  # it tells how each file is read
    try:
        tokenizer = MistralTokenizer.from_file(path)
        backend = MistralBackend(tokenizer.instruct_tokenizer.tokenizer)
        backend.decode(backend.encode("a", add_special_tokens=True), skip_special_tokens=False)
    except BaseException as error:  # the library asserts, and the libraries below it panic
        if isinstance(error, KeyboardInterrupt | SystemExit | ModelError):
            raise
        raise ModelError(f"{path} is not a tokenizer that mistral-common can use: {one_line(error)}") from error
    names = {"bos_token": backend.inner.bos_id, "eos_token": backend.inner.eos_id}
    special = {name: text for name, i in names.items() if (text := backend.id_to_token(i)) is not None}
    return Tokenizer(backend, special, class_name="MistralTokenizer", chat=MistralChat(tokenizer))


def _version(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


class MistralBackend:
    """A TokenizerBackend over mistral-common's Tekkenizer or SentencePieceTokenizer, which is `inner`."""

    def __init__(self, inner: Any) -> None:
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        self.inner = inner
        self.vocab_size: int = inner.n_words
        self._skip, self._keep = SpecialTokenPolicy.IGNORE, SpecialTokenPolicy.KEEP
        self._is_tekken = isinstance(inner, Tekkenizer)
        self.token_bytes: Callable[[int], bytes] | None = self._token_bytes if self._is_tekken else None
        self._ids: Mapping[str, int] | None = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """See TokenizerBackend. What looks like a special token in the text is text."""
        try:
            ids: list[int] = self.inner.encode(text, bos=add_special_tokens, eos=False)
        except ValueError as error:  # such as a run of a million spaces, which tiktoken's expression cannot match
            raise InvalidRequestError(f"the text cannot be encoded: {_said(error)}", "prompt") from error
        except BaseException as error:
            raise_panic(error)
            raise
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """See TokenizerBackend."""
        text: str = self.inner.decode([*ids], special_token_policy=self._skip if skip_special_tokens else self._keep)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """See TokenizerBackend."""
        if not 0 <= token_id < self.vocab_size:
            return None
        token: str = self.inner.id_to_piece(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        """See TokenizerBackend. Pieces of characters have no text of their own, so their ids are not found."""
        if self._ids is None:
            pieces = [*enumerate(self.inner.vocab())]
            self._ids = {piece: i for i, piece in reversed(pieces) if "\ufffd" not in piece}
        return self._ids.get(token)

    def is_special(self, token_id: int) -> bool:
        """See TokenizerBackend."""
        return 0 <= token_id < self.vocab_size and bool(self.inner.is_special(token_id))

    def is_byte(self, token_id: int) -> bool:
        """See TokenizerBackend."""
        return not self._is_tekken and _BYTE_PIECE.fullmatch(self.id_to_token(token_id) or "") is not None

    def _token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            return b""
        piece: bytes = self.inner.id_to_byte_piece(token_id, self._keep)
        return piece


class MistralChat:
    """Conversations to token ids, by mistral-common's own formats. See ChatEncoder."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final_message: bool = False,
        reasoning_effort: str | None = None,
    ) -> list[int]:
        """See ChatEncoder. Calls' ids of other servers are cut to the nine characters that the library takes."""
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        given: dict[str, Any] = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
        try:
            request = ChatCompletionRequest.from_openai(
                [_message(message) for message in messages],
                None if tools is None else [_tool(tool) for tool in tools],
                **given,
            )
            if continue_final_message:
                request.messages[-1] = request.messages[-1].model_copy(update={"prefix": True})
            ids: list[int] = self._tokenizer.encode_chat_completion(request).tokens
        except BaseException as error:
            raise_panic(error)
            if not isinstance(error, Exception):
                raise
            # Errors of the library, and of pydantic and jsonschema below it: all are the request's fault.
            raise InvalidRequestError(
                f"mistral-common does not take the messages: {_said(error)}", "messages"
            ) from error
        return ids


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(message)
    if "tool_call_id" in made:
        made["tool_call_id"] = _short_id(made["tool_call_id"])
    if calls := made.pop("tool_calls", None):
        made["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in calls]
        made["content"] = made.get("content") or None
    return made


def _short_id(call_id: object) -> str:
    return _ID.sub("", call_id)[-_ID_LENGTH:] if isinstance(call_id, str) else ""


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {key: value for key, value in tool["function"].items() if value is not None}
    function.setdefault("parameters", {})
    return {"type": "function", "function": function}


def _said(error: Exception) -> str:
    text = one_line(error)
    return text if len(text) <= 200 else f"{text[:200]}..."
