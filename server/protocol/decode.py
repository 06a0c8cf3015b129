"""Request bodies to typed structs, with errors that name the field as a client wrote it."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from functools import cached_property
from itertools import islice
from typing import Annotated, Any, ClassVar, Generic, TypeAlias, TypeVar, cast

import msgspec
import orjson
from msgspec.inspect import ListType, LiteralType, StructType, Type, UnionType, type_info

from tidewheel.engine.errors import MAX_QUOTED, shortened

from ..errors import ApiError, bad_request
from ..garbage import large_value

logger = logging.getLogger(__name__)

Unsupported: TypeAlias = None
"""The type of a parameter that this server knows of and does not have: clients may send it as null only."""

Ignored: TypeAlias = msgspec.Raw
"""The type of a parameter that this server ignores; its value is not built."""


_NULL = msgspec.Raw(b"null")


def is_given(value: Ignored) -> bool:
    """Whether a client sent more than null."""
    return bool(value) and value != _NULL


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every request's body is."""

    generates: ClassVar[bool] = False
    """Whether it asks for text; other servers have parameters for that under other names."""

    def without_effect(self) -> dict[str, str]:
        """Parameters that some clients always send, with the reason why they have no effect here."""
        return {}


T = TypeVar("T", bound=Body)

OPTIONAL_TAGS = "x-optional-tags"

_INSTEAD = {
    "additional_data": "send only the texts",
    "chat_template": "texts are embedded as they are; --embedding-model may name prompts for prompt_name",
    "ec_transfer_params": "encode and prefill on this server, which keeps no caches elsewhere",
    "early_stopping": "a beam search ends as soon as no beam can become better than those that have ended",
    "embed_dtype": "vectors are float32; encoding_format base64 is their bytes",
    "endianness": "vectors are little-endian",
    "input_type": "send prompt_name, the name of one of the model's own prompts",
    "kv_transfer_params": "prefill and decode on this server, which keeps no caches elsewhere",
    "late_chunking": "send the chunks in input",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "logprob_token_ids": "use logprobs",
    "messages": "send the texts in input",
    "mm_processor_kwargs": "start the server with --mm-processor-kwargs",
    "output_dtype": "vectors are float32; encoding_format base64 is their bytes",
    "prediction": "leave it out: --speculative-config drafts from the prompt for all requests",
    "prompt_embeds": "send text or token ids",
    "repetition_detection": "use frequency_penalty or repetition_penalty",
    "return_token_offsets": "use echo with logprobs, which has text_offset",
    "rank_fields": "send the documents' texts as strings",
    "stream_interval": "chunks are sent as soon as their tokens are generated; join chunks as you read them",
    "task": "send prompt_name, the name of one of the model's own prompts; /v1/pooling has tasks",
}


# What changes an answer, under the names that it has on one server or another; behind them, names of what to send with
# the field that it belongs to.
_SAME: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
    (
        ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict"),
        {"options": "options.num_predict"},
    ),
    (("stop", "stop_sequences"), {"options": "options.stop"}),
    (("repetition_penalty", "repeat_penalty"), {"options": "options.repeat_penalty"}),
    (
        ("response_format", "structured_outputs", "grammar", "json_schema", "regex", "ebnf"),
        {"text": "text.format", "output_config": "output_config.format", "format": "format"},
    ),
    (
        ("reasoning_effort",),
        {"reasoning": "reasoning.effort", "output_config": "output_config.effort", "think": "think"},
    ),
    (("system", "instructions", "system_prompt"), {"messages": "a message of the role system"}),
)
# Samplers that no endpoint here has, and the values with which they do nothing; and what to use.
_OFF: dict[str, tuple[float, str]] = {
    **dict.fromkeys(("n", "num_return_sequences"), (1, ": send more requests")),
    **dict.fromkeys(("tfs", "tfs_z", "typical", "typical_p"), (1, ": use top_k, top_p and min_p")),
    **dict.fromkeys(
        ("dry_multiplier", "dynatemp_range", "mirostat", "mirostat_mode", "top_a", "xtc_probability"),
        (0, ": use top_k, top_p and min_p"),
    ),
}


def documented(**keywords: Any) -> msgspec.Meta:
    """JSON schema keywords for `/openapi.json`, of a rule that is checked elsewhere, which also words the error."""
    return msgspec.Meta(extra_json_schema=keywords)


def optional_tags(*tags: str) -> msgspec.Meta:
    """Says in `/openapi.json` that in a list of structs these tags may lack, which a body's preparation adds."""
    return msgspec.Meta(extra_json_schema={OPTIONAL_TAGS: list(tags)})


class ParameterNotes:
    """Handles top-level parameters that do not exist, as `unknown` says: refuse, warn or ignore.

    Parameters without effect are logged once for each name, and only a limited number of names are logged, so that
    clients cannot fill the log.
    """

    MAX_NAMES = 256

    def __init__(self, unknown: str = "refuse") -> None:
        self.unknown = unknown
        self._noted: set[str] = set()

    def is_new(self, name: str) -> bool:
        """Whether this name would be logged."""
        return len(self._noted) < self.MAX_NAMES and shortened(name) not in self._noted

    def unheeded(self, name: str, reason: str) -> None:
        """A client sent a parameter that does nothing, for this reason."""
        name = shortened(name)
        if self.is_new(name):
            self._noted.add(name)
            logger.info("The parameter %r of requests has no effect: %s (said once)", name, reason)


_PATH = re.compile(r"^(?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*?)`")
_UNKNOWN_TYPE = re.compile(r"^Invalid value (?P<value>'.*')$", re.DOTALL)
_STEP = re.compile(r"\[[^]]*\]|[^.[\]]+")
_LONGEST_MESSAGE = 1000  # characters of msgspec's that are looked at, at either end
_LONGEST_PATH = 200  # it has indices, and names that are not the client's
_UNKNOWN_REASON = "this server does not know it (--unknown-parameters refuse answers it with an error)"
_MAX_NAMES = 8  # of one body, in the log
_LARGE_BODY = 2**18  # bytes; from there on it matters how often the garbage collector walks what is decoded


class BodyDecoder(Generic[T]):
    """Decodes JSON bodies of one type. Raises ApiError (400) naming the field at fault.

    `prepare` gets a body that is not of the type, to raise a better error or to change it, for protocols that let a
    `type` be left out. It gets whatever JSON a client sent; integers that 64 bits do not hold are floats, so that all
    of it can be written again.
    """

    def __init__(
        self,
        body_type: type[T],
        prepare: Callable[[Any], None] | None = None,
        *,
        notes: ParameterNotes,
    ) -> None:
        self._prepare = prepare
        self._notes = notes
        self._fields = body_type.__struct_encode_fields__
        self._elsewhere = _elsewhere(self._fields) if body_type.generates else {}
        others: list[tuple[str, Any, Any]] = [(name, kind, None) for name, (kind, _) in self._elsewhere.items()]
        twin = msgspec.defstruct(
            body_type.__name__, others, bases=(body_type,), forbid_unknown_fields=False, kw_only=True
        )
        self._lenient = cast("type[T]", twin)
        self._type = self._lenient if notes.unknown == "ignore" else body_type

    @cached_property
    def _decoder(self) -> msgspec.json.Decoder[T]:
        """Made for the first body: making all endpoints' decoders takes a good part of a small model's start."""
        return msgspec.json.Decoder(self._type)

    def __call__(self, body: bytes | bytearray) -> T:
        try:
            with large_value() if len(body) >= _LARGE_BODY else nullcontext():
                decoded = self._decode(body)
        except msgspec.ValidationError as error:
            raise self._invalid(str(error)) from None
        except (msgspec.DecodeError, orjson.JSONDecodeError, UnicodeDecodeError) as error:
            raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
        except RecursionError:
            raise bad_request("the body is nested too deeply", code="invalid_json") from None
        for name, reason in decoded.without_effect().items():
            self._notes.unheeded(name, reason)
        return decoded

    def _decode(self, body: bytes | bytearray) -> T:
        warns = self._notes.unknown == "warn"
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            path, reason = _located(str(error))
            unknown = None if path else _UNKNOWN.match(reason)
            can_be_mended = self._prepare is not None if unknown is None else warns
            if not can_be_mended:
                raise
        if self._prepare is None:
            assert unknown is not None
            is_large = len(body) >= _LARGE_BODY  # which may have millions of names
            self._warn([unknown["field"]] if is_large else msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
            return msgspec.json.decode(body, type=self._lenient)
        raw = orjson.loads(body)
        self._prepare(raw)
        if warns and isinstance(raw, dict):
            self._warn(raw)
        return msgspec.convert(raw, self._lenient if warns else self._type, str_keys=True)

    def _warn(self, names: Iterable[str]) -> None:
        known = {*self._fields, *self._elsewhere}
        for name in islice((name for name in names if name not in known), _MAX_NAMES):
            if self._notes.is_new(name):  # to look for a similar name takes a millisecond
                self._notes.unheeded(name, _UNKNOWN_REASON + self._hint(name))

    def _invalid(self, text: str) -> ApiError:
        path, reason = _located(text)
        if unknown := _UNKNOWN.match(reason):
            return self._unknown_field(path, unknown["field"])
        if missing := _MISSING.match(reason):
            param = _join(path, missing["field"])
            return bad_request(f"{param} is required", param, "missing_required_parameter")
        if path in self._elsewhere:
            return unsupported(path, self._elsewhere[path][1])
        if reason.startswith("Expected `null`"):
            return unsupported(path)
        if path.endswith("type") and (unknown := _UNKNOWN_TYPE.match(reason)):
            return unsupported(path, f": {shortened(unknown['value'])}")
        reason = shortened(reason)
        if reason.startswith("Invalid enum value") and (values := self._values(path)):
            reason += f"; it takes {', '.join(values)}"
        if not path:
            return bad_request(f"the body must be a JSON object: {reason}")
        return bad_request(f"{path}: {reason[0].lower()}{reason[1:]}", path, "invalid_type")

    @cached_property
    def _shape(self) -> Type:
        return type_info(self._type)  # some milliseconds

    def _values(self, path: str) -> list[str]:
        """The texts that may stand at a path."""
        types = [self._shape]
        for step in _STEP.findall(path):
            # Each once: a type that has itself in several of its members has as many ways down as it is deep.
            types = list({id(inner): inner for one in types for inner in _within(one, step)}.values())
        literals = [member for one in types for member in _members(one) if isinstance(member, LiteralType)]
        return sorted({str(value) for literal in literals for value in literal.values})

    def _unknown_field(self, path: str, field: str) -> ApiError:
        param = _join(path, shortened(field))
        hint = "" if path else self._hint(field)
        return bad_request(f"unknown parameter {param}{hint}", param, "unknown_parameter")

    def _hint(self, name: str) -> str:
        if name in self._elsewhere:
            return self._elsewhere[name][1]
        close = difflib.get_close_matches(name, self._fields, 1) if len(name) <= MAX_QUOTED else []
        return f"; did you mean {close[0]}?" if close else ""


def _elsewhere(fields: Collection[str]) -> dict[str, tuple[Any, str]]:
    """Parameters of other servers that change answers: the types of values that do not, and what to send."""
    found: dict[str, tuple[Any, str]] = {}
    for names, within in _SAME:
        here = [name for name in names if name in fields] + [name for field, name in within.items() if field in fields]
        found |= {name: (None, f": send {here[0]}" if here else "") for name in names if name not in fields}
    for name, (off, instead) in _OFF.items():
        if name not in fields:
            kind = Annotated[float, msgspec.Meta(ge=off, le=off)] | None
            found[name] = kind, f" unless it is {off:g}{instead}"
    return found


def _members(one: Type) -> tuple[Type, ...]:
    return one.types if isinstance(one, UnionType) else (one,)


def _within(one: Type, step: str) -> Iterator[Type]:
    """The types of what a step of a path leads to."""
    for member in _members(one):
        if isinstance(member, StructType):
            yield from (field.type for field in member.fields if field.encode_name == step)
        elif isinstance(member, ListType) and step.startswith("["):
            yield member.item_type


def _located(text: str) -> tuple[str, str]:
    """The path that msgspec's error leads to, and what is wrong there. It may quote a name of any length in between."""
    if len(text) > 2 * _LONGEST_MESSAGE:
        text = text[:_LONGEST_MESSAGE] + text[-_LONGEST_MESSAGE:]
    reason, _, place = text.rpartition(" - at ")
    located = _PATH.match(place)
    return (located["path"][:_LONGEST_PATH], reason) if located else ("", text)


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def unsupported(param: str, detail: str = "") -> ApiError:
    """A 400 for a parameter, or a value of one, that other servers have and this one has not."""
    if not detail and param in _INSTEAD:
        detail = f": {_INSTEAD[param]}"
    return bad_request(f"{param} is not supported by this server{detail}", param, "unsupported_parameter")
