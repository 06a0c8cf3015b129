"""Bodies of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

from __future__ import annotations

from .decode import Body


class LoadLoraRequest(Body):
    """The adapter at `lora_path` is served as `lora_name`. That is a folder of the server's machine, or a hub id.

    `load_inplace` replaces an adapter of that name.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadLoraRequest(Body):
    """The adapter `lora_name` is served no more. `lora_int_id` is not looked at."""

    lora_name: str
    lora_int_id: int | None = None
