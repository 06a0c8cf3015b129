"""What the application's options name: files, import paths, a collector of traces.

Options that cannot be used are reported before a model is looked for. So this module imports little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidewheel.engine.declaring.record import record
from tidewheel.engine.errors import ModelError, TidewheelError
from tidewheel.engine.files.reading import require_file
from tidewheel.engine.files.wording import reason, shown
from tidewheel.engine.models.generation import GenerationConfig, read_generation_config, sampling_defaults

from .app_options import AppOptions, check_api_key
from .http.api_keys import ApiKey, ApiKeys, admin_key, key_of_line, plain_key
from .stores.opening import open_store

if TYPE_CHECKING:
    from starlette.middleware import Middleware

    from .stores.base import SharedStore
    from .telemetry.tracing import Tracer


@record(frozen=True, kw_only=True)
class AppResources:
    """What the application's options name, read and made.

    `keys` are all API keys, including a file's. `chat_template` None means the tokenizer's own template, and
    `sampling_defaults` None the engine's defaults. `sampling_overrides` replace values of either.
    """

    keys: ApiKeys = field(default_factory=ApiKeys, repr=False)
    middleware: Sequence[Middleware] = ()
    chat_template: str | None = None
    sampling_defaults: Mapping[str, float | int] | None = None
    sampling_overrides: Mapping[str, float | int] = field(default_factory=dict)
    tracer: Tracer | None = None
    shared_store: SharedStore | None = None

    async def close(self) -> None:
        """Close the store and the tracer."""
        if self.shared_store is not None:
            await self.shared_store.close()
        if self.tracer is not None:
            import asyncio  # a start uses this module before it loads a model

            await asyncio.to_thread(self.tracer.close)


def find_resources(options: AppOptions) -> AppResources:
    """Read and import what the options name. Raises TidewheelError, saying which option cannot be used."""
    file_keys = () if options.api_key_file is None else read_key_file(options.api_key_file)
    return AppResources(
        keys=ApiKeys([*map(plain_key, options.api_keys), *map(admin_key, options.admin_api_keys), *file_keys]),
        middleware=_middleware(options.middleware),
        tracer=_tracer(options.otlp_traces_endpoint),
        shared_store=None
        if options.shared_store is None
        else open_store(options.shared_store, options.shared_store_password),
        **_of_model(options),
    )


def resources_of_model(shared: AppResources, options: AppOptions) -> AppResources:
    """The resources of a server of several models, with what the options of one of them name. Raises TidewheelError."""
    return replace(shared, **_of_model(options))


def _of_model(options: AppOptions) -> dict[str, Any]:
    return {
        "chat_template": _chat_template(options.chat_template),
        "sampling_defaults": _sampling_defaults(options.generation_config),
        "sampling_overrides": _sampling_overrides(options.override_generation_config),
    }


def read_key_file(path: str) -> Sequence[ApiKey]:
    """The keys in a file, one a line, without empty lines and those that begin with #. Raises TidewheelError."""
    try:
        lines = [line.strip() for line in Path(path).read_text("utf-8-sig").splitlines()]
    except (OSError, ValueError) as error:
        raise TidewheelError(f"--api-key-file {path} cannot be used: {reason(error)}") from error
    keys = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        try:
            if wrong := check_api_key(line.split()[0]):
                raise ValueError(f"has no key: {wrong}")
            keys.append(key_of_line(line))
        except ValueError as error:
            raise TidewheelError(f"--api-key-file {path} cannot be used: line {number} {error}") from None
    if not keys:
        raise TidewheelError(f"--api-key-file {path} has no keys in it")
    return keys


def _middleware(paths: Sequence[str]) -> Sequence[Middleware]:
    if not paths:
        return ()
    from .http.middleware import import_middleware

    return [import_middleware(path) for path in paths]


def _tracer(endpoint: str | None) -> Tracer | None:
    if endpoint is None:
        return None
    from .telemetry.tracing import Tracer

    return Tracer(endpoint)


def _chat_template(option: str | None) -> str | None:
    if option is None:
        return None
    from .chat.templates import read_template_option  # with jinja, which takes a while to import

    return read_template_option(option)


def _sampling_defaults(generation_config: str) -> Mapping[str, float | int] | None:
    """What `--generation-config` says; None is the model's own defaults."""
    if generation_config == "auto":
        return None
    if generation_config == "vllm":
        return {}
    folder = Path(generation_config)
    try:
        require_file(folder / "generation_config.json")
        return sampling_defaults(read_generation_config(folder, {}))
    except ModelError as error:
        raise ModelError(f"--generation-config: {error}") from error


def _sampling_overrides(given: Mapping[str, Any] | None) -> Mapping[str, float | int]:
    for name, value in (given or {}).items():
        if type(value) not in (int, float):
            raise ModelError(f"--override-generation-config: {name} must be a number, got {shown(value)}")
    return sampling_defaults(GenerationConfig(**(given or {}), origin="--override-generation-config"))
