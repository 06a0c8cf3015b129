"""ChatTokenizer: an LLM's tokenizer, which also renders conversations as LLM.chat does."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NoReturn, cast

from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.text.tokenizer import ChatTemplate as TemplateSource
from tidewheel.engine.text.tokenizer import Tokenizer

from .not_there import NamesOfVllm
from .prompts import Conversation, Prompts

_OF_TENSORS = (
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "padding", "truncation", "max_length",
    "tokenizer_kwargs",
)  # fmt: skip


class ChatTokenizer(Tokenizer, NamesOfVllm):
    """A model's tokenizer, with the chat template that LLM.chat uses."""

    def __init__(self, tokenizer: Tokenizer, prompts: Prompts) -> None:
        vars(self).update(vars(tokenizer))  # it shares all that the model's has
        self._prompts = prompts

    def __await__(self) -> Generator[None, None, ChatTokenizer]:
        """Itself: scripts wait for the tokenizer of vLLM's AsyncLLM."""
        yield from ()
        return self

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        """Raises InvalidRequestError: transformers gives tensors and masks here."""
        raise InvalidRequestError("a tokenizer cannot be called: encode() gives the token ids of a text", "text")

    def __len__(self) -> int:
        """How many tokens there are, added ones too."""
        return self.vocab_size

    @property
    def chat_template(self) -> TemplateSource | None:
        """The template, or several by name. One that is set is for all later conversations of the LLM."""
        return self._prompts.template

    @chat_template.setter
    def chat_template(self, template: TemplateSource | None) -> None:
        self._prompts.template = template

    def apply_chat_template(
        self,
        conversation: Conversation | Sequence[Conversation],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int] | list[str | list[int]]:
        """The prompt of a conversation, or the prompts of several: token ids, or without `tokenize` text.

        `variables` are more of the template's, such as enable_thinking. Raises InvalidRequestError.
        """
        for name in _OF_TENSORS:
            if variables.pop(name, None):
                raise InvalidRequestError(f"{name} is not supported: the result is token ids or a text", name)
        fields = {
            "chat_template": chat_template,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": None if continue_final_message else add_generation_prompt,
            "continue_final_message": continue_final_message or None,
            "chat_template_kwargs": variables or None,
        }
        if conversation and isinstance(conversation[0], Mapping):
            return self._prompt(cast("Conversation", conversation), fields, tokenize)
        return [self._prompt(one, fields, tokenize) for one in cast("Sequence[Conversation]", conversation)]

    def _prompt(self, conversation: Conversation, fields: Mapping[str, Any], tokenize: bool) -> str | list[int]:
        rendered = self._prompts.rendered(conversation, **fields)
        if not tokenize:
            return rendered.text
        if rendered.token_ids is not None:
            return rendered.token_ids
        return self.encode(rendered.text, add_special_tokens=False)  # the template writes them itself
