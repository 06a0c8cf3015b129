"""Translates a request of `/v1/responses` into a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidewheel.engine.errors import quoted

from ..chat.sealed_reasoning import unseal_reasoning
from ..chat.tool_results import UNSEEN_IMAGE
from ..errors import bad_request
from ..protocol import chat, structured
from ..protocol.decode import unsupported
from ..protocol.response_items import (
    BuiltInCall,
    BuiltInCallOutput,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputFile,
    InputImage,
    InputText,
    Item,
    LocalShellCall,
    Message,
    Reasoning,
    Refusal,
    ServerToolItem,
)
from ..protocol.responses import JsonSchemaFormat, PlainFormat, ResponsesRequest, TextConfig
from .built_in_tools import past_call, result_of
from .custom_input import as_arguments
from .offered_tools import OfferedTools, flat_name

_FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "verbosity": "text.verbosity",
}
_SAME = (
    "model",
    "parallel_tool_calls",
    "service_tier",
    "temperature",
    "top_p",
    "cache_salt",
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "top_k",
)

_COMPUTER_TOOLS = ("computer", "computer_use", "computer_use_preview")


def prepare_body(body: Any) -> None:
    """Writes the types that clients may leave out into a body as it was decoded. Raises ApiError (400) for a tool whose
    results are pictures.
    """
    items = body.get("input") if isinstance(body, dict) else None
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and item.get("type") is None:
            item["type"] = "item_reference" if item.keys() <= {"id", "type"} else "message"
    tools = body.get("tools") if isinstance(body, dict) else None
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in _COMPUTER_TOOLS:
            raise unsupported(
                f"tools[{i}].type", f": {quoted(kind)}, whose results are pictures; offer functions that return text"
            )


def chat_request(
    body: ResponsesRequest,
    earlier: Sequence[Item],
    items: Sequence[Item],
    offered: OfferedTools,
    *,
    sees_images: bool,
) -> tuple[chat.ChatCompletionRequest, dict[str, str]]:
    """The request for the chat path, and the names of its fields for `renamed_fields`.

    `items` are the body's input, `earlier` those of stored responses before it, and `offered` its tools. Without
    `sees_images` the model is told of the images in tools' results, and others are refused. Raises ApiError (400) for
    values that this server has no way to honour.
    """
    body.check_supported()
    conversation = _Conversation(sees_images=sees_images)
    if body.instructions is not None:
        conversation.add(chat.Message(role="system", content=body.instructions), "instructions")
    for item in earlier:
        conversation.add_item(item, "previous_response_id")
    for i, item in enumerate(items):
        conversation.add_item(item, f"input[{i}]")
    if not conversation.messages:
        raise bad_request("input is required", "input", "missing_required_parameter")
    text = body.text or TextConfig()
    request = chat.ChatCompletionRequest(
        messages=conversation.messages,
        tools=offered.functions or None,
        tool_choice=offered.choice(body.tool_choice),
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_logprobs,
        top_logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        response_format=_response_format(text),
        verbosity=text.verbosity,
        **{name: getattr(body, name) for name in _SAME},
    )
    return request, {**_FIELD_NAMES, **offered.names, **conversation.names}


class _Conversation:
    """Combines items into turns. An assistant's message starts a new turn, unless the open one has only reasoning."""

    def __init__(self, *, sees_images: bool) -> None:
        self.messages: list[chat.Message] = []
        self.names: dict[str, str] = {}
        self._sees_images = sees_images
        self._turn: chat.Message | None = None  # of the assistant; more may be added to it
        self._local_shells: dict[str, str] = {}  # their calls, by what results may name

    def add(self, message: chat.Message, path: str) -> None:
        self.names[f"messages[{len(self.messages)}]"] = path
        self.messages.append(message)
        self._turn = message if message.role == "assistant" else None

    def add_item(self, item: Item, path: str) -> None:
        if isinstance(item, Reasoning):
            self._add_reasoning(item, path)
        elif isinstance(item, FunctionCall | CustomToolCall):
            arguments = item.arguments if isinstance(item, FunctionCall) else as_arguments(item.input)
            function = chat.PastFunctionCall(flat_name(item.name, item.namespace or None), arguments)
            self._add_call(item.call_id, function, path)
        elif isinstance(item, BuiltInCall):
            if isinstance(item, LocalShellCall):
                self._local_shells |= {str(item.id): item.call_id, item.call_id: item.call_id}
            self._add_call(item.call_id, past_call(item), path)
        elif isinstance(item, BuiltInCallOutput):
            call_id = item.call_id or self._named_call(item, path)
            self.add(chat.Message(role="tool", content=result_of(item), tool_call_id=call_id), path)
        elif isinstance(item, FunctionCallOutput | CustomToolCallOutput):
            content = item.output if isinstance(item.output, str) else self._result(item.output)
            self._name_parts(content, f"{path}.output")
            self.add(chat.Message(role="tool", content=content, tool_call_id=item.call_id), path)
        elif isinstance(item, ServerToolItem):
            pass
        elif item.role == "assistant":
            said = self._turn
            if said is None or said.content is not None or said.tool_calls:
                said = self._new_turn(path)
            said.content = _content(item)
        else:
            content = _content(item)
            self._name_parts(content, f"{path}.content", item.content)
            self.add(chat.Message(role=item.role, content=content), path)

    def _result(self, output: Sequence[Any]) -> list[chat.ContentPart]:
        if self._sees_images:
            return _parts(output)
        return _parts([InputText(UNSEEN_IMAGE) if isinstance(part, InputImage) else part for part in output])

    def _name_parts(self, content: str | list[chat.ContentPart], path: str, sent: Sequence[Any] = ()) -> None:
        """Names the images among the parts of the message that is added next. `sent` are the parts as they were sent,
        if some may be files.
        """
        for i, part in enumerate(content if isinstance(content, list) else ()):
            if part.type != "input_image":
                continue
            file = sent[i] if sent and isinstance(sent[i], InputFile) else None
            if not self._sees_images:
                kind = "input_image" if file is None else "input_file"
                raise unsupported(f"{path}[{i}].type", f": {kind!r}; this model reads text")
            place = f"messages[{len(self.messages)}].content[{i}]"
            url = (
                "image_url" if file is None else "file_url" if file.file_data is None and file.file_url else "file_data"
            )
            self.names |= {f"{place}.image_url": f"{path}[{i}].{url}", f"{place}.file_id": f"{path}[{i}].file_id"}

    def _add_call(self, call_id: str, function: chat.PastFunctionCall, path: str) -> None:
        turn = self._turn or self._new_turn(path)
        turn.tool_calls = turn.tool_calls or []
        self.names[f"messages[{len(self.messages) - 1}].tool_calls[{len(turn.tool_calls)}].function"] = path
        turn.tool_calls.append(chat.PastToolCall(call_id, function))

    def _named_call(self, item: BuiltInCallOutput, path: str) -> str:
        """The call that a result names by its `id`: clients write the call's id there, or its item's id."""
        call_id = self._local_shells.get(str(item.id))
        if call_id is None:
            raise bad_request(f"{path}.call_id: the result names no local_shell_call before it", f"{path}.call_id")
        return call_id

    def _new_turn(self, path: str) -> chat.Message:
        turn = chat.Message(role="assistant")
        self.add(turn, path)
        return turn

    def _add_reasoning(self, item: Reasoning, path: str) -> None:
        text = "".join(part.text for part in item.content or ())
        if not text and item.encrypted_content:
            text = unseal_reasoning(item.encrypted_content, f"{path}.encrypted_content")
        if not text:
            text = "\n".join(part.text for part in item.summary or ())
        turn = self._turn
        if turn is None or turn.content is not None or turn.tool_calls or turn.reasoning_content:
            turn = self._new_turn(path)
        turn.reasoning_content = text


def _content(item: Message) -> str | list[chat.ContentPart]:
    return item.content if isinstance(item.content, str) else _parts(item.content)


def _parts(content: Sequence[Any]) -> list[chat.ContentPart]:
    return [_part(part) for part in content]


def _part(part: Any) -> chat.ContentPart:
    if isinstance(part, Refusal):
        return chat.ContentPart("refusal", refusal=part.refusal)
    if isinstance(part, InputImage):
        return chat.ContentPart("input_image", image_url=part.image_url, file_id=part.file_id, detail=part.detail)
    if isinstance(part, InputFile):
        url = part.file_url if part.file_data is None else part.file_data
        return chat.ContentPart("input_image", image_url=url, file_id=part.file_id, detail=part.detail)
    return chat.ContentPart("text", part.text)


def _response_format(text: TextConfig) -> structured.ResponseFormat | None:
    wanted = text.format
    if wanted is None or isinstance(wanted, PlainFormat):
        return None
    if isinstance(wanted, JsonSchemaFormat):
        schema = structured.JsonSchemaFormat(wanted.name, wanted.schema, wanted.description, wanted.strict)
        return structured.ResponseFormat("json_schema", schema)
    return structured.ResponseFormat("json_object")
