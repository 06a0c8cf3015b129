"""Compiled programs are kept: a second start compiles nothing. Their folder is the user's alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidewheel.engine.devices.tpu.compile_cache import use_compile_cache
from tidewheel.engine.errors import DeviceError

pytest.importorskip("jax")

START = """
import json, sys
import jax
from engine.devices.made_models import PLAIN, decoder
from engine.devices.tpu import making
from harness import Harness
from tidewheel.engine.devices.tpu.options import TpuOptions

counts = {"cache_hits": 0, "cache_misses": 0}
def hear(event, **_):
    name = event.rpartition("/")[2]
    if name in counts:
        counts[name] += 1
jax.monitoring.register_event_listener(hear)
executor = making.load(decoder(PLAIN), tpu=TpuOptions(xla_cache_path=sys.argv[1]))
executor.warm_up(lambda done, steps: None)
tokens = Harness(executor).generate([[1, 2, 3]], 4)[0].output
print(json.dumps([counts, tokens]))
"""


def start(folder: Path) -> tuple[dict[str, int], list[int]]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run(
        [sys.executable, "-c", START, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
        env=environment,
    )
    counts, tokens = json.loads(done.stdout.splitlines()[-1])
    return counts, tokens


# Two processes import JAX, and the first compiles.
@pytest.mark.sweep
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    first, tokens = start(folder)
    assert first["cache_misses"] >= 4  # a step, a head, the copying, an empty cache
    assert folder.stat().st_mode & 0o777 == 0o700
    second, again = start(folder)
    assert second == {"cache_hits": first["cache_misses"] + first["cache_hits"], "cache_misses": 0}
    assert again == tokens


def test_what_was_compiled_is_found_again(tmp_path: Path) -> None:
    import jax

    folder, found = tmp_path / "new" / "cache", list[str]()
    jax.monitoring.register_event_listener(lambda event, **_: found.append(event.rpartition("/")[2]))
    use_compile_cache(str(folder))
    try:
        assert folder.stat().st_mode & 0o777 == 0o700
        for expected in ("cache_misses", "cache_hits"):
            found.clear()
            jax.clear_caches()  # as in a new process
            assert jax.jit(lambda x: x * 3 + 1)(7) == 22
            assert {"cache_misses", "cache_hits"}.intersection(found) == {expected}
    finally:
        use_compile_cache(None)


def test_it_does_not_matter_how_the_folder_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX looks for programs by the arguments of the command line, too."""
    import jax

    folder, found = str(tmp_path / "cache"), list[str]()
    jax.monitoring.register_event_listener(lambda event, **_: found.append(event.rpartition("/")[2]))
    for arguments, expected in (
        ([], "cache_misses"),
        ([f"--xla-cache-path={folder}"], "cache_hits"),
        (["--xla_cache_path", folder], "cache_hits"),
        (["--xla_tpu_some_flag=true"], "cache_misses"),  # which may change programs
    ):
        monkeypatch.setattr(sys, "argv", ["tidewheel", "serve", *arguments])
        use_compile_cache(folder)
        try:
            found.clear()
            jax.clear_caches()
            assert jax.jit(lambda x: x * 5 + 2)(7) == 37
        finally:
            use_compile_cache(None)
        assert {"cache_misses", "cache_hits"}.intersection(found) == {expected}


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(DeviceError, match=f"chmod 700 {folder}, or choose another with --xla-cache-path"):
        use_compile_cache(str(folder))


def test_the_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(DeviceError, match="belongs to another user"):
        use_compile_cache(str(tmp_path))


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DeviceError, match="cannot be made"):
        use_compile_cache(str(tmp_path / "file" / "cache"))
