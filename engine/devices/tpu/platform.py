"""Which platform of JAX computes: a TPU, or the processor where JAX_PLATFORMS=cpu asks for it."""

from __future__ import annotations

import logging
import os

from ...errors import DeviceError
from ...install_hint import install_command


def runs_on_cpu() -> bool:
    """Whether the user has asked for JAX's CPU platform."""
    return os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"


def require_platform() -> None:
    """Import jax and find its devices. Raises DeviceError, saying what is missing and what to do."""
    try:
        import jax
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib"):
            raise
        raise DeviceError(f"the tpu device needs jax: {install_command('tpu')}") from error
    if (log := logging.getLogger("jax")).level == logging.NOTSET:
        log.setLevel(logging.WARNING)  # it tells of its own housekeeping
    try:
        found = jax.default_backend()
    except RuntimeError as error:
        raise DeviceError(f"JAX cannot start on a TPU: {error}") from error
    if found != ("cpu" if runs_on_cpu() else "tpu"):
        raise DeviceError(
            f"JAX finds no TPU here (its platform is {found}): install the TPU's library with "
            f"{install_command('tpu')}, and give a container the TPU with docker run --privileged --net=host. "
            "JAX_PLATFORMS=cpu computes on the processor, for tests"
        )
