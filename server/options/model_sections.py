"""The `models:` of a `--config` file: a section for each model, whose keys are flags.

models:
  coder:
    model: ./qwen2.5-coder-7b-Q4_K_M.gguf
    aliases: [gpt-4]
    max-model-len: 16k
  embedder: BAAI/bge-m3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tidewheel.engine.declaring.mistakes import Mistakes
from tidewheel.engine.declaring.option import Option, Options, option, options_of
from tidewheel.engine.declaring.values import at_least, number_or_none
from tidewheel.engine.model_names import name_of_file, short_name

from .config_file import as_command_line
from .hosting import ModelSection, split_named, wrong_name
from .model import MODEL_OPTIONS, model_parser
from .parser import add_option, read_given
from .vllm_flags import read_vllm_line

MAX_MODELS = 4096
"""Most models of a server."""

_OF_A_MODEL = frozenset(
    "runner convert task pooler_config embedding_threads embedding_dtype chat_template default_chat_template_kwargs "
    "trust_request_chat_template generation_config override_generation_config default_sampling response_role "
    "return_tokens_as_token_ids enable_force_include_usage enable_auto_tool_choice tool_call_parser reasoning_parser "
    "max_queue max_prompts max_n max_answer_size request_timeout".split()
)
"""The server's options that each model may have its own of."""
_OF_THE_PROCESS = frozenset(
    "threads_bind reserved_cpus tensor_parallel_size pipeline_parallel_size pipeline_split".split()
)
"""The engine's options that all models share, because they share the cores."""
_INSTEAD = {
    "served_model_name": "a section's key is the model's name, and aliases has more names",
    "embedding_model": "give the embedding model a section of its own",
    "served_embedding_model_name": "give the embedding model a section of its own",
}


@dataclass(frozen=True, kw_only=True)
class _SectionOptions(Options):
    """What only a section has."""

    aliases: Sequence[str] = option((), "more names of the model", metavar="NAME")
    pin: bool = option(False, "never unload the model to make room, nor because it is idle")
    preload: bool = option(False, "load the model when the server starts")
    idle: float | None = option(
        None,
        "unload the model when no request has used it for so long; 0 is never [--model-idle-timeout]",
        parse=number_or_none,
        check=at_least(0),
        metavar="SECONDS",
    )


def read_sections(
    models: object, server_options: Sequence[Option], mistakes: Mistakes
) -> tuple[list[ModelSection], list[str]]:
    """The sections of a file's `models:`, and what to log of them. `server_options` are all that are not the engine's.

    `mistakes` gets what is wrong with them, each with the model's name.
    """
    if not isinstance(models, Mapping) or not all(isinstance(name, str) for name in models):
        mistakes.add(
            "models: must have a section for each model, with its name as the key (in quotes if it is a number)"
        )
        return [], []
    if len(models) > MAX_MODELS:
        mistakes.add(f"models: has {len(models)} sections, and a server has at most {MAX_MODELS} models")
        return [], []
    own = [o for o in MODEL_OPTIONS if o.name not in _OF_THE_PROCESS]
    own += (of_server := [o for o in server_options if o.name in _OF_A_MODEL])
    foreign = [o for o in (*MODEL_OPTIONS, *server_options) if o not in own]
    others = {flag: o.name for o in foreign for flag in (o.flag, *o.declaration.flag_aliases)}
    parser = model_parser("models:", "")
    group = parser.add_argument_group("models")
    for declared in (*of_server, *options_of(_SectionOptions)):
        add_option(group, declared)
    found: list[ModelSection] = []
    notes: list[str] = []
    for name, section in models.items():
        of_one = Mistakes(f"models: {name}: ")
        if wrong := wrong_name(name):
            of_one.add(f"the name {wrong}")
        elif (line := _line(section, others, of_one)) is not None:
            read = read_vllm_line(line, parser.flags)
            for refusal in read.refusals:
                of_one.add(refusal)
            found.append(_section(name, parser.read(read.ours, of_one), own, of_one))
            notes += (f"models: {name}: {note}" for note in read.notes)
        for sentence in of_one.sentences:
            mistakes.add(sentence)
    return found, notes


def _line(section: object, others: Mapping[str, str], mistakes: Mistakes) -> list[str] | None:
    """A section as a command line."""
    if section is None or isinstance(section, str):
        section = {"model": section}
    if not isinstance(section, Mapping) or not all(isinstance(key, str) for key in section):
        mistakes.add("must be a folder, a file or a hub id, or have one option a line, such as max-model-len: 4096")
        return None
    kept = {}
    for key, value in section.items():
        if (foreign := others.get("--" + key.replace("_", "-"))) is None:
            kept[key] = value
        else:
            mistakes.add(f"{key}: {_INSTEAD.get(foreign, 'it is for the whole server: give it outside models')}")
    return as_command_line(kept)


def _section(name: str, parsed: Mapping[str, Any], own: Sequence[Option], mistakes: Mistakes) -> ModelSection:
    aliases = tuple(dict.fromkeys(alias for alias in parsed.get("aliases", ()) if alias != name))
    for alias in aliases:
        if wrong := wrong_name(alias):
            mistakes.add(f"aliases: a name {wrong}, got {alias!r:.100}")
    return ModelSection(
        name=name,
        where=parsed.get("model"),
        given=read_given([o for o in own if o.name != "model"], parsed, {}, mistakes),
        aliases=aliases,
        pin=parsed.get("pin", False),
        preload=parsed.get("preload", False),
        idle_s=parsed.get("idle"),
        has_idle="idle" in parsed,
    )


def line_sections(texts: Sequence[str], mistakes: Mistakes) -> list[ModelSection]:
    """The models that a command line names, each as WHERE or NAME=WHERE."""
    found = []
    for text in dict.fromkeys(texts):
        given, where = split_named(text)
        name = given or short_name(where)
        if given is None and wrong_name(name):  # a path that is not there, as its load will tell
            name = name_of_file(Path(where).name)
        if wrong := wrong_name(name):
            mistakes.add(f"--model {text}: its name {wrong}; give it another, as in --model NAME={where}")
        else:
            found.append(ModelSection(name=name, where=where))
    return found


def embedding_sections(given: Mapping[str, Any], mistakes: Mistakes) -> list[ModelSection]:
    """The models of --embedding-model, which among several models are models as all others."""
    models = given.get("embedding_model", ())
    names = given.get("served_embedding_model_name", ()) or [*map(short_name, models)]
    if len(names) != len(models):
        mistakes.add(f"--served-embedding-model-name needs {len(models)} names, one for each --embedding-model")
    pairs = zip(names, models, strict=False)
    return [ModelSection(name=name, where=where, given={"runner": "pooling"}) for name, where in pairs]


def alone(section: ModelSection, given: Mapping[str, Any], names: Sequence[str]) -> ModelSection:
    """The only model of a server: all options that were given are its own, and the first of the names is its name."""
    names = [*dict.fromkeys((*names, *([] if names else [section.name])))]
    return replace(section, name=names[0], aliases=tuple(names[1:]), given={**given, **section.given})


def joined_sections(
    line: Sequence[ModelSection], of_file: Sequence[ModelSection], mistakes: Mistakes
) -> list[ModelSection]:
    """All models, the line's first. One that the file has too keeps the file's options, and the line says where it is.

    `mistakes` gets each name that two models have.
    """
    sections = {section.name: section for section in of_file}
    joined = {}
    for one in line:
        if one.name in joined:
            mistakes.add(f"two models are named {one.name}: give each its own name, as in --model NAME={one.where}")
        section = sections.pop(one.name, None)
        joined[one.name] = one if section is None else replace(section, where=one.where)
    joined |= sections
    owners = dict.fromkeys(joined)
    for section in joined.values():
        for alias in section.aliases:
            if alias in owners:
                mistakes.add(f"models: {section.name}: the alias {alias} is a name of {owners[alias] or alias}")
            owners[alias] = section.name
    return [*joined.values()]
