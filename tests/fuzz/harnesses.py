"""Everything that reads what others wrote, as functions of bytes. One raises only for a mistake of ours.

A harness catches the errors that a reader may raise for bad input and nothing else. `seeds` are inputs that get far:
what fuzzers begin from and change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from fuzz.connections import CONNECTIONS
from fuzz.folders import FOLDERS, TEMPLATE
from fuzz.grammars import GRAMMARS
from fuzz.harness import Harness, written
from fuzz.images import IMAGES
from fuzz.request_heads import REQUEST_HARNESSES

from tidewheel.engine.errors import InvalidRequestError, ModelError
from tidewheel.server.anthropic.translation import chat_request as from_messages
from tidewheel.server.chat.messages import template_messages, template_tools
from tidewheel.server.chat.model_formats import model_formats
from tidewheel.server.chat.pieces import Turn
from tidewheel.server.chat.reasoning_formats import REASONING_PARSERS
from tidewheel.server.chat.templates import ChatTemplate
from tidewheel.server.chat.tools import TOOL_CALL_PARSERS
from tidewheel.server.errors import ApiError
from tidewheel.server.generation.structured_output import structured_output
from tidewheel.server.protocol.chat import ChatCompletionRequest, Tool, ToolFunction
from tidewheel.server.protocol.cohere import CohereEmbedRequest
from tidewheel.server.protocol.completions import CompletionRequest
from tidewheel.server.protocol.decode import BodyDecoder, ParameterNotes
from tidewheel.server.protocol.embeddings import EmbeddingRequest
from tidewheel.server.protocol.messages import CountTokensRequest, MessagesRequest
from tidewheel.server.protocol.pooling import PoolingRequest
from tidewheel.server.protocol.response_items import ItemReference
from tidewheel.server.protocol.responses import ResponsesRequest
from tidewheel.server.protocol.sampling import GenerationBody, sampling_params
from tidewheel.server.protocol.scoring import RerankRequest, ScoreRequest
from tidewheel.server.protocol.tei import TeiPredictRequest
from tidewheel.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from tidewheel.server.responses.offered_tools import OfferedTools
from tidewheel.server.responses.translation import chat_request as from_responses
from tidewheel.server.responses.translation import prepare_body

LONGEST_TEXT = 300  # characters that a parser is given one by one


CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2.5]}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "max_completion_tokens": 4, "logprobs": True, "top_logprobs": 2, "stream": True,
    "stream_options": {"include_usage": True}, "stop": ["x", "y"], "logit_bias": {"5": 1.5}, "seed": 7, "n": 2,
}  # fmt: skip
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": ["a", "b"], "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "logprobs": 2},
    {"prompt": [[1, 2], [3]], "guided_json": {"type": "object"}, "min_p": 0.1, "bad_words": ["a"], "priority": 1},
    {"prompt": "a", "structured_outputs": {"regex": "a+"}, "allowed_token_ids": [1], "stop_token_ids": [2]},
    {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
]
RESPONSES: list[dict[str, Any]] = [
    {"input": "Hi", "instructions": "Be brief.", "max_output_tokens": 4, "temperature": 0.5,
     "include": ["message.output_text.logprobs"], "top_logprobs": 2,
     "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}},
    {"input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"}, {"id": "msg_1"}],
     "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}],
     "tool_choice": {"type": "function", "name": "f"}, "reasoning": {"effort": "low"}, "stream": True},
    {"input": [
        {"role": "user", "content": "Hi"},
        {"type": "custom_tool_call", "call_id": "c", "name": "g", "input": "a", "namespace": "n"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
        {"type": "web_search_call", "id": "w", "status": "completed"}],
     "tools": [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [
        {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition":
         'start: a+ | "b"~1..2\na: /[x-z]/ ["c".."d"]\n%import common.LF'}}]}],
     "tool_choice": {"type": "custom", "name": "g", "namespace": "n"}, "client_metadata": {"a": "b"}},
]  # fmt: skip
MESSAGES: list[dict[str, Any]] = [
    {"messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "So.", "signature": "s"},
            {"type": "text", "text": "Well"}, {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3", "is_error": True}]}],
     "system": [{"type": "text", "text": "Be brief."}], "max_tokens": 4, "stop_sequences": ["x"], "top_k": 3,
     "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "tool", "name": "f"}},
    {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2000, "metadata": {"user_id": "u"},
     "thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}},
    {"messages": [
        {"role": "system", "content": "A"}, {"role": "user", "content": "Hi"},
        {"role": "system", "content": [{"type": "text", "text": "B"}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}],
     "tools": [{"type": "bash_20250124", "name": "bash"}, {"type": "web_search_20250305", "name": "w"}],
     "max_tokens": 4, "thread": {"type": "create"}, "thinking": {"type": "enabled", "display": "updates"}},
]  # fmt: skip
TOOLS = [Tool("function", ToolFunction("f", parameters={"properties": {"a": {"type": "integer"}, "b": {}}}))]
CALLS = [
    '<tool_call>\n{"name": "f", "arguments": {"a": [1, "</tool_call>", "ü 🌊"]}}\n</tool_call> and on',
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}',
    '<|python_tag|>{"name": "f", "parameters": {"a": "b"}}; {"name": "g", "parameters": {}}',
    "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>",
    "[f(a=1, b='x\\n'), g(c=[True, None, {'d': -1.5}])]",
    '<|tool_call|>[{"name": "f", "arguments": {}}]',
    'functools[{"name": "f", "arguments": {}}]',
    "<think>So.</think>\n\nWell",
    *[
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>" + call
        + "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>"
        for call in (
            'function<\uff5ctool\u2581sep\uff5c>f\n```json\n{"a": 1}\n```',
            'f<\uff5ctool\u2581sep\uff5c>{"a": 1}',
        )
    ],
]  # fmt: skip


def body(
    body_type: type[msgspec.Struct],
    understand: Callable[[Any], object],
    *seeds: dict[str, Any],
    prepare: Callable[[Any], None] | None = None,
) -> Harness:
    kinds = ("refuse", "warn", "ignore")
    decoders = [BodyDecoder(body_type, prepare, notes=ParameterNotes(unknown)) for unknown in kinds]

    def run(data: bytes) -> None:
        strict, warned, ignored = (decoded_or_none(one, data, body_type) for one in decoders)
        assert strict is None or strict == warned
        assert warned is None or warned == ignored  # which may have what is no UTF-8 in what it skips
        # `as_api_error` answers a RecursionError as a body that is nested too deeply.
        with contextlib.suppress(ApiError, InvalidRequestError, RecursionError):
            understand(decoders[0](data))

    return Harness(run, written(*seeds))


def decoded_or_none(decode: BodyDecoder[Any], data: bytes, body_type: type[msgspec.Struct]) -> Any:
    """A body's fields, as its type has them, written again."""
    try:
        decoded = decode(data)
        return msgspec.json.encode({name: getattr(decoded, name) for name in body_type.__struct_fields__})
    except (ApiError, RecursionError):
        return None


def understand_generation(request: Any) -> None:
    request.check_supported()
    assert isinstance(request, GenerationBody)
    sampling_params(request, request.endpoint_sampling(), {})
    structured_output(request)
    if isinstance(request, CompletionRequest):
        request.prompts()


_chat_template = ChatTemplate(TEMPLATE, {})


def understand_conversation(request: Any) -> None:
    messages = template_messages(request.messages or ())
    text = _chat_template.render(messages, template_tools(request.tools), variables=request.chat_template_kwargs)
    assert isinstance(text, str)


def understand_chat(request: ChatCompletionRequest) -> None:
    understand_generation(request)
    understand_conversation(request)


def understand_response(request: ResponsesRequest) -> None:
    items = [] if isinstance(request.input, str) or request.input is None else request.input
    given = [item for item in items if not isinstance(item, ItemReference)]
    understand_chat(from_responses(request, [], given, OfferedTools(request.tools or ()), sees_images=False)[0])


def tool_calls(name: str) -> Harness:
    def parsed(*texts: str, cut_off: bool = False) -> tuple[str, list[tuple[str, str]]]:
        parser = TOOL_CALL_PARSERS[name](TOOLS)
        pieces = [piece for text in texts for piece in parser.feed(text)] + parser.finish(cut_off=cut_off)
        turn = Turn.of(pieces)
        return turn.content, [(call.name, call.arguments) for call in turn.calls]

    tags = {*TOOL_CALL_PARSERS[name].markers, "functools", "<function="}

    def run(data: bytes) -> None:
        split_everywhere(parsed, data)
        split_everywhere(partial(parsed, cut_off=True), data)
        text = data.decode(errors="replace")[:LONGEST_TEXT]
        content, calls = parsed(text)
        for cut in range(0, len(text) if calls and not content else 0, 5):
            content, known = parsed(text[:cut], cut_off=True)
            is_frame = known or name not in ("llama3_json", "pythonic", "llama4_pythonic")
            assert not is_frame or any(tag.startswith(content.strip()) for tag in tags)

    return Harness(run, [call.encode() for call in CALLS])


def reasoning(name: str) -> Harness:
    def parsed(*texts: str) -> tuple[str, str]:
        parser = REASONING_PARSERS[name]("")
        turn = Turn.of([piece for text in texts for piece in parser.feed(text)] + parser.finish())
        return turn.reasoning, turn.content

    return Harness(lambda data: split_everywhere(parsed, data), [call.encode() for call in CALLS])


def split_everywhere(parsed: Callable[..., object], data: bytes) -> None:
    """The same is read of a text in one piece, in single characters, and cut in two at each character."""
    text = data.decode(errors="replace")[:LONGEST_TEXT]
    whole = parsed(text)
    assert parsed(*text) == whole
    for cut in range(0, len(text), 1 + len(text) // 40):
        assert parsed(text[:cut], text[cut:]) == whole


def chat_template(data: bytes) -> None:
    model_formats(data.decode(errors="replace"))
    try:
        template = ChatTemplate(data.decode(errors="replace"), {"bos_token": "<s>"})
    except ModelError:
        return
    with contextlib.suppress(ApiError):
        assert isinstance(template.render([{"role": "user", "content": "hi"}]), str)


HARNESSES: dict[str, Harness] = {
    "chat": body(ChatCompletionRequest, understand_chat, CHAT, *({**CHAT, **more} for more in COMPLETIONS[1:])),
    "completion": body(CompletionRequest, understand_generation, *COMPLETIONS),
    "responses": body(ResponsesRequest, understand_response, *RESPONSES, prepare=prepare_body),
    "messages": body(
        MessagesRequest, lambda request: understand_chat(from_messages(request)[0]), *MESSAGES
    ),
    "count-tokens": body(
        CountTokensRequest,
        lambda request: understand_conversation(from_messages(request)[0]),
        {"messages": MESSAGES[0]["messages"]},
    ),
    "tokenize": body(TokenizeRequest, understand_conversation, {"prompt": "a"}, {"messages": CHAT["messages"]}),
    "detokenize": body(DetokenizeRequest, lambda request: None, {"tokens": [1, 2]}),
    "embedding": body(EmbeddingRequest, lambda request: request.inputs(), {"input": ["a", "b"]}, {"input": [[1], [2]]}),
    "pooling": body(PoolingRequest, lambda request: request.inputs(), {"input": ["a", "b"], "task": "token_embed"}),
    "cohere": body(CohereEmbedRequest, lambda request: request.wanted(), {"texts": ["a"], "max_tokens": 3}),
    "predict": body(
        TeiPredictRequest, lambda request: request.sequences(), {"inputs": [["a"], ["b", "c"]]}, {"inputs": ["a", "b"]}
    ),
    "score": body(
        ScoreRequest,
        lambda request: request.texts(),
        {"text_1": "a", "text_2": ["b", "c"]},
        {"queries": ["a"], "documents": "b"},
    ),
    "rerank": body(
        RerankRequest,
        lambda request: (request.texts(), request.limit(), request.cut()),
        {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
    ),
    **{f"tools-{name}": tool_calls(name) for name in TOOL_CALL_PARSERS},
    **{f"reasoning-{name}": reasoning(name) for name in REASONING_PARSERS},
    "template": Harness(
        chat_template, [TEMPLATE.encode(), b"{{ messages[0]['content'] | upper }}{% set x = 1 %}{{ x }}"]
    ),
    **CONNECTIONS,
    **GRAMMARS,
    **IMAGES,
    **REQUEST_HARNESSES,
    **FOLDERS,
}  # fmt: skip
