"""OpenVINO's logits of windows of tokens, of the model that OpenVINO GenAI makes of a GGUF file.

usage: openvino_logits.py FILE.gguf THREADS

Input and output are as those of llama_cpp_logits.py.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai


def write_logits(file: Path, threads: int, windows: list[list[int]], out: Any) -> None:
    """Write the logits of all tokens of each window. Raises RuntimeError if OpenVINO fails."""
    with tempfile.TemporaryDirectory() as folder:  # where it leaves the model that it makes
        linked = Path(folder) / file.name
        try:
            linked.symlink_to(file.resolve())
        except OSError:
            shutil.copy(file, linked)
        genai.LLMPipeline(str(linked), "CPU", enable_save_ov_model=True)
        compiled = openvino.Core().compile_model(
            next(Path(folder).glob("*model.xml")), "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
    request = compiled.create_infer_request()
    for window in windows:
        request.reset_state()
        given = {
            "input_ids": np.array([window]),
            "attention_mask": np.ones((1, len(window)), np.int64),
            "position_ids": np.arange(len(window))[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        results = request.infer({name: given[name] for port in compiled.inputs for name in port.names if name in given})
        out.write(results["logits"][0].astype(np.float32).tobytes())
    out.flush()


def main() -> None:
    """Do what the command line says."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what OpenVINO prints is not for the reader
    write_logits(Path(sys.argv[1]), int(sys.argv[2]), json.load(sys.stdin), out)


if __name__ == "__main__":
    main()
