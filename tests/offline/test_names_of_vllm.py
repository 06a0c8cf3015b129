"""Names that scripts import from vLLM: they are here, or an error says what to do instead."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import tidewheel
from tidewheel.outputs import RequestOutput

# All names that versions of vLLM have had in their `__all__`, from 0.1 to 0.11.
VLLM_ALL = (
    "AsyncEngineArgs AsyncLLMEngine ClassificationOutput ClassificationRequestOutput CompletionOutput EmbeddingOutput "
    "EmbeddingRequestOutput EngineArgs LLM LLMEngine ModelRegistry PoolingOutput PoolingParams PoolingRequestOutput "
    "PromptInputs PromptStrictInputs PromptType RequestOutput SamplingParams ScoringOutput ScoringRequestOutput "
    "ServerArgs TextPrompt TokensPrompt __version__ __version_tuple__ initialize_cluster initialize_ray_cluster"
).split()
REFUSED = {
    *("ModelRegistry", "PromptInputs", "PromptStrictInputs"),
    *("ServerArgs", "initialize_cluster", "initialize_ray_cluster"),
}
WORKS = {
    "config": "",
    "engine.arg_utils": "AsyncEngineArgs EngineArgs",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "engine.llm_engine": "LLMEngine",
    "entrypoints.llm": "LLM",
    "inputs": "PromptType TextPrompt TokensPrompt",
    "inputs.data": "TextPrompt TokensPrompt",
    "logprobs": "Logprob",
    "lora.request": "LoRARequest",
    "outputs": "ClassificationRequestOutput CompletionOutput EmbeddingRequestOutput PoolingRequestOutput RequestOutput "
    "ScoringRequestOutput",
    "pooling_params": "PoolingParams",
    "sampling_params": "BeamSearchParams GuidedDecodingParams RequestOutputKind SamplingParams StructuredOutputsParams",
    "sequence": "Logprob RequestMetrics",
    "utils": "FlexibleArgumentParser random_uuid",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.llm_engine": "LLMEngine",
}
NOT_THERE = """
from tidewheel.assets.image import ImageAsset
from tidewheel.config import CompilationConfig, CUDAGraphMode
from tidewheel.config import KVTransferConfig
from tidewheel.config import PoolerConfig
from tidewheel.config import VllmConfig
from tidewheel.distributed.parallel_state import destroy_model_parallel
from tidewheel.engine.metrics import StatLoggerBase
from tidewheel.entrypoints.chat_utils import load_chat_template
from tidewheel.entrypoints.openai.serving_chat import OpenAIServingChat
from tidewheel.entrypoints.openai.tool_parsers import ToolParserManager
from tidewheel.inputs import EmbedsPrompt
from tidewheel.inputs.data import EmbedsPrompt
from tidewheel.logger import init_logger
from tidewheel.lora.models import LoRAModel
from tidewheel.model_executor.models.registry import ModelRegistry
from tidewheel.multimodal import MultiModalDataDict
from tidewheel.platforms import current_platform
from tidewheel.sampling_params import LogitsProcessor
from tidewheel.transformers_utils.tokenizer import get_tokenizer
from tidewheel.usage.usage_lib import UsageContext
from tidewheel.utils import get_open_port
from tidewheel.v1.metrics.reader import Counter
from tidewheel.v1.sample.logits_processor import LogitsProcessor
import tidewheel.model_executor
""".strip().splitlines()


@pytest.mark.parametrize("name", VLLM_ALL)
def test_a_name_of_vllms_package_works_or_says_what_to_do(name: str) -> None:
    if name not in REFUSED:
        exec(f"from tidewheel import {name}", {})
        return
    assert not hasattr(tidewheel, name)
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}': .{{20}}"):
        getattr(tidewheel, name)
    with pytest.raises(ImportError, match=rf"^tidewheel has no {name}: .{{20}}"):
        exec(f"from tidewheel import {name}", {})


@pytest.mark.parametrize("module", WORKS)
def test_names_are_where_vllm_has_them(module: str) -> None:
    for name in WORKS[module].split():
        exec(f"from tidewheel.{module} import {name}", {})


@pytest.mark.parametrize("line", NOT_THERE)
def test_an_import_that_has_no_meaning_says_what_to_do(line: str) -> None:
    with pytest.raises(ImportError, match=r"^(tidewheel\S* has|there is) no \S+: .{20}"):
        exec(line, {})


def test_what_nobody_has_is_python_s_own_error() -> None:
    with pytest.raises(ImportError, match=r"^cannot import name 'Wheel' from 'tidewheel'"):
        exec("from tidewheel import Wheel", {})
    with pytest.raises(ImportError, match=r"^cannot import name 'Wheel' from 'tidewheel.outputs'"):
        exec("from tidewheel.outputs import Wheel", {})
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'tidewheel.wheel'"):
        exec("import tidewheel.wheel", {})
    assert importlib.util.find_spec("tidewheel.wheel") is None


@pytest.mark.sweep
def test_modules_need_not_be_imported_themselves() -> None:
    code = "import tidewheel\nprint(tidewheel.outputs.RequestOutput, tidewheel.inputs.PromptType)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(RequestOutput) in done.stdout
