"""The folder of compiled programs. JAX keeps and finds them by what they were compiled from and for."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ...errors import DeviceError

_FLAGS = "--xla-cache-path", "--xla_cache_path"


def use_compile_cache(path: str | None) -> None:
    """Keep all compiled programs in the folder from now on, for this process; None keeps none.

    The folder is made for this user alone. Raises DeviceError for one that is another user's or that others can write
    to, because programs that are found there are run.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    folder = None if path is None else _private_folder(Path(path).expanduser())
    if jax.config.jax_compilation_cache_dir != folder:
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", folder)
    if folder is not None:
        _keep_flags_out_of_keys()
        # Also what compiles fast: a second start is to compile nothing.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _keep_flags_out_of_keys() -> None:
    """Find programs whether the folder was named by a flag or by a variable.

    JAX takes each argument of the command line that begins with `--xla` for a flag of XLA's compiler, and finds only
    what was compiled with the same flags. It has a list of flags that change no program.
    """
    from jax._src import cache_key

    others = cache_key.xla_flags_to_exclude_from_cache_key
    others.extend(flag for flag in _FLAGS if flag not in others)


def _private_folder(folder: Path) -> str:
    advice = "choose another with --xla-cache-path"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise DeviceError(f"the folder of compiled programs cannot be made: {error}; {advice}") from error
    if status.st_uid != os.geteuid():
        raise DeviceError(f"{folder} belongs to another user, and the compiled programs in it would be run: {advice}")
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise DeviceError(
            f"other users can write to {folder}, and the compiled programs in it would be run: chmod 700 {folder}, "
            f"or {advice}"
        )
    return str(folder)
