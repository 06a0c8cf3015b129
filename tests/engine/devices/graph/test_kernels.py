"""The kernels compute what torch's own operations do, and compile for the GPUs that they are for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine.devices.graph.compiling import TARGETS, compile_for
from optional_packages import require_packages
from samples import swept

pytest.importorskip("torch")
require_packages("triton")

TESTS = Path(__file__).parents[3]
SLOPES = [0.5, 0.25, 0.125, 0.1, 0.05, 0.01]
CASES: list[list[Any]] = [
    ["experts", "float32", 1],
    ["decodes", "float32", 6, 2, 40, None, {"sliding_window": 40, "sinks": True, "alibi_slopes": SLOPES}],
    ["decodes", "float32", 20, 1, 72, 56, {}],
]
MORE_CASES = [
    ["experts", "float32", 16],
    ["experts", "float16", 32],
    ["experts", "float16", 256],
    ["decodes", "float32", 4, 4, 80, None, {"softcap": 3.0}],
    ["decodes", "float16", 8, 2, 64, None, {"sliding_window": 7}],
    ["decodes", "float16", 20, 1, 576, 512, {}],
]


@pytest.mark.parametrize("cases", [CASES, swept(MORE_CASES)], ids=["some", "more"])
def test_interpreted_kernels_compute_what_torch_does(cases: list[list[Any]]) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, "-m", "engine.devices.graph.interpreted_kernels", json.dumps(cases)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=TESTS)
    assert run.returncode == 0, run.stderr
    for case, error in zip(cases, json.loads(run.stdout), strict=True):
        assert error < (2e-6 if case[1] == "float32" else 2e-3), case


@pytest.mark.parametrize("target", [name if name == "sm_90" else swept(name) for name in TARGETS])
@pytest.mark.parametrize("size", [128, swept(1), swept(32)])
def test_products_with_experts_compile(target: str, size: int) -> None:
    from tidewheel.engine.devices.graph.kernels.experts import multiply_kernel, tiles_of

    types = dict.fromkeys(("x", "matrices", "out"), "*bf16") | {
        "experts": "*i64",
        "used": "*i64",
        "N": "i32",
        "K": "i32",
    }
    made = compile_for(TARGETS[target], multiply_kernel, types, {"SIZE": size, **tiles_of(size)})
    if target == "sm_90":
        assert ("wgmma" if size >= 64 else "mma.sync") in made.asm["ptx"], "its tensor cores multiply"


@pytest.mark.parametrize("target", [name if name == "sm_90" else swept(name) for name in TARGETS])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim"),
    [(128, 1, 576, 512), swept(32, 8, 128, 128), swept(8, 4, 256, 256), swept(71, 1, 64, 64), swept(32, 32, 96, 96)],
)
def test_attention_of_decodes_compiles(target: str, heads: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
    from tidewheel.engine.devices.graph.kernels.decode_attention import attend_kernel, tile_sizes

    is_latent = key_dim != value_dim
    types = dict.fromkeys(("q", "keys", "values"), "*bf16") | {"tables": "*i64", "positions": "*i64", "slopes": "*fp32"}
    types |= {"partial": "*fp32", "sums": "*fp32", "scale": "fp32", "softcap": "fp32", "window": "i32"}
    types |= dict.fromkeys(("table_stride", "key_stride", "value_stride", "value_head_stride"), "i32")
    sizes = tile_sizes(8, heads, kv_heads, key_dim, value_dim, values_in_keys=is_latent)
    sizes |= {"NUM_HEADS": heads, "KV_HEADS": kv_heads, "D": key_dim, "VALUE_D": value_dim, "PAGE": 128}
    sizes |= {"VALUES_IN_KEYS": is_latent, "HAS_SOFTCAP": True, "HAS_SLOPES": True, "num_warps": 4, "num_stages": 2}
    compile_for(TARGETS[target], attend_kernel, types, sizes)
