"""`tidewheel inspect`: what a model is, whether it is served, and what memory it takes, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tidewheel.engine.declaring.mistakes import Mistakes, made
from tidewheel.engine.declaring.option import options_of
from tidewheel.engine.encoders.inspection import EncoderInspection
from tidewheel.engine.files.wording import in_bytes
from tidewheel.engine.loading.inspection import Inspection, KvMemory, Verdict, inspect_model
from tidewheel.engine.media.options import MediaOptions
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.pipeline_options import PipelineOptions
from tidewheel.engine.speculation.options import Eagle3, Mtp, SpeculativeOptions
from tidewheel.engine.weights.measured_quality import MEASURED_ON

from ..options.parser import OptionParser, build, read_asked
from .sizes import in_thousands

_OPTIONS = (
    "revision", "download_dir", "tokenizer", "skip_tokenizer_init", "device", "dtype", "quantization",
    "quantization_group_size", "quantization_zero_points", "kv_cache_dtype", "max_model_len", "pipeline_parallel_size",
    "pipeline_split", "language_model_only", "mmproj", "mm_processor_kwargs", "image_min_tokens", "image_max_tokens",
)  # fmt: skip


_MAX_LABELS = 16  # are shown


def run(arguments: Sequence[str]) -> int:
    """The `inspect` command. Raises ModelError if nothing can be said of the model."""
    parser = OptionParser(
        prog="tidewheel inspect",
        description="Show what a model is, whether it is supported, and how much memory it needs. Nothing is loaded; "
        "for a hub id, only headers are fetched.",
        epilog="The exit code is 1 if the model would be refused.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file or a hub id, such as owner/name:Q4_K_M")
    parser.add_argument("--json", action="store_true", help="print JSON")
    declared = (*options_of(EngineOptions), *options_of(PipelineOptions), *options_of(MediaOptions))
    options = [option for option in declared if option.field in _OPTIONS]
    options += [option for option in options_of(SpeculativeOptions) if option.field == "speculative_config"]
    parsed, asked = read_asked(parser, "as it would be served", options, arguments, _asked)
    found = inspect_model(asked)
    print(json.dumps(asdict(found), indent=2) if parsed["json"] else render(found))
    return 0 if found.refusal is None else 1


def _asked(model: str, given: Mapping[str, Any]) -> EngineOptions:
    """The options of what was given, by name. Raises OptionError."""
    mistakes = Mistakes()
    speculative = mistakes.attempt(build, SpeculativeOptions, given)
    pipeline, media = mistakes.attempt(build, PipelineOptions, given), mistakes.attempt(build, MediaOptions, given)
    layer = speculative.speculation if speculative else None
    if not (isinstance(layer, Mtp | None) or (isinstance(layer, Eagle3) and Path(layer.model).is_dir())):
        mistakes.add(
            "--speculative-config: inspect counts only the model's own layer (mtp) or one in a folder (eagle3); "
            "leave the option out"
        )
    groups = {"pipeline": pipeline, "media": media, "speculative": speculative}
    others: dict[str, Any] = {name: group for name, group in groups.items() if group is not None}
    options = mistakes.attempt(lambda: build(EngineOptions, given, model=model, **others))
    mistakes.raise_any()
    return made(options)


def render(found: Inspection | EncoderInspection) -> str:
    """The findings for people, one fact a line."""
    lines = [*_encoder(found)] if isinstance(found, EncoderInspection) else [*_what_it_is(found), *_memory(found)]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {value}".rstrip() for name, value in lines)


def _encoder(found: EncoderInspection) -> Iterator[tuple[str, str]]:
    yield "model", found.model
    named = found.files[0] if len(found.files) == 1 else f"{len(found.files)} files"
    yield "checkpoint", f"{found.format}: {named}, {in_bytes(found.bytes)}"
    kind = {None: "", True: " (cross-encoder)", False: " (embedding model)"}[found.is_cross_encoder]
    if found.labels and not found.is_cross_encoder:
        kind = " (classifier)"
    yield "architecture", f"{found.architecture or 'unknown'}{kind}"
    if found.is_cross_encoder:
        yield "gives", "a score of a query and a document" + (", through a sigmoid" if found.activation else "")
    elif found.labels:
        yield "gives", f"{len(found.labels)} labels, {'logits' if found.activation is None else found.activation}"
    elif found.is_cross_encoder is not None:
        size = "vectors" if found.width is None else f"vectors of {found.width} numbers"
        pooled = f", the tokens' pooled by {', '.join(found.pooling)}" if found.pooling else ""
        yield "gives", f"{size}{pooled}{', normalized' if found.normalize else ''}"
    if found.labels and not found.is_cross_encoder:
        shown = ", ".join(found.labels[:_MAX_LABELS])
        more = len(found.labels) - _MAX_LABELS
        yield "labels", shown + (f" and {more} more" if more > 0 else "")
    if found.matryoshka is False:
        yield "dimensions", "vectors cannot be cut, the config says"
    elif found.matryoshka is not None and found.matryoshka is not True:
        yield "dimensions", f"vectors may be cut to {', '.join(map(str, found.matryoshka))} numbers"
    if found.tasks:
        yield "tasks", ", ".join(found.tasks)
    if found.in_graph:
        yield (
            "",
            (f"the graph must contain the whole model, because Tidewheel does not compute {', '.join(found.in_graph)}"),
        )
    if found.prompts:
        default = f"; the default is {found.default_prompt_name}" if found.default_prompt_name is not None else ""
        yield "prompts", f"{', '.join(found.prompts)}{default}"
    if found.max_length is not None:
        yield "context", f"{found.max_length} tokens"
    if found.vocab_size is not None:
        yield "vocabulary", f"{found.vocab_size} tokens"
    served = "yes, alone, or beside a chat model with --embedding-model"
    yield "served", served if found.refusal is None else f"no: {found.refusal}"
    if found.memory_bytes is None:
        yield "weights take", f"about {in_bytes(found.bytes)}, on the processor"
    else:
        yield "weights take", f"about {in_bytes(found.memory_bytes)} as {found.dtype}, on the processor"


def _what_it_is(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "model", found.model
    if found.contents is not None:
        files = found.contents.files
        named = files[0] if len(files) == 1 else f"{len(files)} files"
        title = f", {found.contents.title}" if found.contents.title else ""
        yield "checkpoint", f"{found.contents.kind}{title}: {named}, {in_bytes(found.contents.num_bytes)}"
    family = "" if found.shape is None else f" (family {found.shape.family})"
    yield "architecture", f"{found.architecture or 'unknown'}{family}"
    if (shape := found.shape) is not None:
        active = "" if shape.active == shape.parameters else f", {in_thousands(shape.active)} of them for each token"
        yield "parameters", f"{in_thousands(shape.parameters)}{active}"
        kinds = ", ".join(f"{count} {kind}" for kind, count in shape.mixers.items())
        yield "layers", f"{shape.layers} ({kinds}), hidden size {shape.hidden_size}"
        for heads in shape.heads:
            yield "attention", heads
        if shape.state_bytes:
            yield "state", f"{in_bytes(shape.state_bytes)} for each sequence, whatever its length"
        yield "context", f"{shape.context} tokens"
        yield "vocabulary", f"{shape.vocab_size} tokens"
    if found.quantization is not None:
        yield "quantization", found.quantization
    for number, stored in enumerate(found.contents.formats if found.contents else ()):
        noun = "tensor" if stored.tensors == 1 else "tensors"
        yield "tensors" if number == 0 else "", f"{stored.name}: {stored.tensors} {noun}, {in_bytes(stored.bytes)}"
    yield "served", _served(found)
    for reason in _reasons(found.verdicts):
        yield "", reason


def _served(found: Inspection) -> str:
    if found.refusal is not None:
        return f"no: {found.refusal}"
    able = [verdict.device for verdict in found.verdicts if verdict.runs]
    return f"yes, on {', '.join(able)}"


def _reasons(verdicts: Sequence[Verdict]) -> Iterator[str]:
    for verdict in verdicts:
        if verdict.reason is not None:
            yield f"not on {verdict.device}: {verdict.reason}"


def _memory(found: Inspection) -> Iterator[tuple[str, str]]:
    for number, kept in enumerate(found.weights):
        chosen = f", on the {found.device} device with these options" if kept.chosen else ""
        cost = "" if kept.divergence is None else f" (KL {kept.divergence:g})"
        yield "weights take" if number == 0 else "", f"{in_bytes(kept.bytes)} as {kept.kept_as}{cost}{chosen}"
    if any(kept.divergence is not None for kept in found.weights):
        yield "", f"KL: nats a token that the format cost {MEASURED_ON}: docs/performance.md"
    if (vision := found.vision) is not None:
        tower = f"{in_thousands(vision.parameters)} parameters, a part of the weights with room for the largest image"
        yield "images", f"{in_bytes(vision.bytes)} for a tower of {tower}"
        yield "", f"tokens: {', '.join(f'{tokens} for {size} pixels' for size, tokens in vision.tokens.items())}"
    if found.mtp_bytes is not None:
        use = '--speculative-config \'{"method": "mtp"}\''
        yield "MTP layer takes", f"{in_bytes(found.mtp_bytes)} of weights, with {use}"
    for number, stage in enumerate(found.stages):
        yield "stages" if number == 0 else "", f"{stage.layers}: {in_bytes(stage.bytes)}"
    for number, cached in enumerate(found.kv_cache):
        yield "KV cache takes" if number == 0 else "", f"{_cached(cached)}, for a sequence of {cached.tokens} tokens"


def _cached(cached: KvMemory) -> str:
    return ", ".join(f"{in_bytes(count)} as {dtype}" for dtype, count in cached.bytes.items())
