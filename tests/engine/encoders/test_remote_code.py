"""Encoders with code of their own and no class in transformers: NomicBERT with experts, and Jina's XLM-RoBERTa."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import encoder_zoo as zoo
import gguf
import gguf_encoders
import gguf_files
import numpy as np
import pytest
from numpy.typing import NDArray
from optional_packages import require_packages
from safetensors.numpy import save_file

from tidewheel import LLM
from tidewheel.engine.encoders.embedder import Embedder
from tidewheel.engine.encoders.load import load_encoders
from tidewheel.engine.encoders.tokenization import EncoderInput
from tidewheel.engine.errors import InvalidRequestError, ModelError

torch = pytest.importorskip("torch")
pytest.importorskip("tidewheel._native")
require_packages("transformers")
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

Floats = NDArray[np.float32]
Tensors = dict[str, Floats]
Read = Callable[[str], Tensor]

HIDDEN, HEADS, INNER, EXPERTS, LAYERS, RANK = 32, 2, 48, 5, 4, 3
ORIGINAL, LORA = "parametrizations.weight.original", "parametrizations.weight.0.lora_"
TASKS = {"retrieval.query": "the query : ", "retrieval.passage": "corn ", "text-matching": ""}
NOMIC = {
    "architectures": ["NomicBertModel"], "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_inner": INNER,
    "activation_function": "gelu", "layer_norm_epsilon": 1e-5, "rotary_emb_base": 10000, "rotary_emb_fraction": 1.0,
    "max_trained_positions": 96, "type_vocab_size": 1, "qkv_proj_bias": True, "mlp_fc1_bias": True,
    "mlp_fc2_bias": True, "moe_every_n_layers": 2, "moe_top_k": 2, "num_experts": EXPERTS, "num_shared_experts": 0,
    "moe_normalize_expert_weights": False, "expert_choice_router": False, "use_rms_norm": None,
}  # fmt: skip
JINA = {
    "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "hidden_size": HIDDEN, "hidden_act": "gelu",
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": INNER, "layer_norm_eps": 1e-5,
    "max_position_embeddings": 98, "pad_token_id": 1, "position_embedding_type": "rotary", "rotary_emb_base": 20000.0,
    "type_vocab_size": 1, "lora_adaptations": [*TASKS], "lora_rank": RANK, "lora_alpha": 2,
    "task_instructions": TASKS,
}  # fmt: skip


def rotated(x: Tensor, base: float) -> Tensor:
    """Rope over the halves of heads `[heads, T, size]`."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * base ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def linear(read: Read, name: str, x: Tensor) -> Tensor:
    return functional.linear(x, read(f"{name}.weight"), read(f"{name}.bias"))


def experts(read: Read, name: str, x: Tensor) -> Tensor:
    """Each token's two likeliest experts, weighed by their shares of all, and one bias."""
    shares = (x @ read(f"{name}.router.layer.weight").T).softmax(-1)
    top = shares.topk(2)
    weights = torch.zeros_like(shares).scatter(1, top.indices, top.values)
    w1, w2 = (read(f"{name}.experts.mlp.{part}").view(EXPERTS, INNER, HIDDEN) for part in ("w1", "w2"))
    inner = functional.gelu(torch.einsum("td,eid->tei", x, w1))
    return torch.einsum("tei,eid,te->td", inner, w2, weights) + read(f"{name}.experts.bias")


def plain(read: Read, ids: Sequence[int], attention: str, base: float, has_experts: Callable[[int], bool]) -> Floats:
    """The mean of a text's tokens behind the last layer, in float32."""

    def norm(name: str, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (HIDDEN,), read(f"{name}.weight"), read(f"{name}.bias"), 1e-5)

    x = read("embeddings.word_embeddings.weight")[list(ids)] + read("embeddings.token_type_embeddings.weight")[0]
    x = norm("emb_ln", x)
    for index in range(LAYERS):
        layer = f"encoder.layers.{index}"
        q, k, v = linear(read, f"{layer}.{attention}.Wqkv", x).view(len(ids), 3, HEADS, -1).permute(1, 2, 0, 3)
        scores = rotated(q, base) @ rotated(k, base).mT / q.shape[-1] ** 0.5
        seen = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(ids), -1)
        x = norm(f"{layer}.norm1", x + linear(read, f"{layer}.{attention}.out_proj", seen))
        if has_experts(index):
            inner = experts(read, f"{layer}.mlp", x)
        else:
            inner = linear(read, f"{layer}.mlp.fc2", functional.gelu(linear(read, f"{layer}.mlp.fc1", x)))
        x = norm(f"{layer}.norm2", x + inner)
    mean: Floats = x.mean(0).numpy()
    return mean


def shapes_of(attention: str, has_experts: Callable[[int], bool]) -> dict[str, tuple[int, ...]]:
    words = zoo.tokenizer("bert").vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (words, HIDDEN),
        "embeddings.token_type_embeddings.weight": (1, HIDDEN),
    }
    norms = ["emb_ln"]
    for layer in (f"encoder.layers.{index}" for index in range(LAYERS)):
        linears = {f"{attention}.Wqkv": (3 * HIDDEN, HIDDEN), f"{attention}.out_proj": (HIDDEN, HIDDEN)}
        norms += [f"{layer}.norm1", f"{layer}.norm2"]
        if has_experts(int(layer.rpartition(".")[2])):
            shapes[f"{layer}.mlp.router.layer.weight"] = (EXPERTS, HIDDEN)
            shapes |= {f"{layer}.mlp.experts.mlp.{part}": (EXPERTS * INNER, HIDDEN) for part in ("w1", "w2")}
            shapes[f"{layer}.mlp.experts.bias"] = (HIDDEN,)
        else:
            linears |= {"mlp.fc1": (INNER, HIDDEN), "mlp.fc2": (HIDDEN, INNER)}
        for name, shape in linears.items():
            shapes |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
    return shapes | {f"{name}.{kind}": (HIDDEN,) for name in norms for kind in ("weight", "bias")}


def made(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    random = np.random.default_rng(7)
    return {
        name: (random.standard_normal(shape) / (shape[-1] ** 0.5 if len(shape) > 1 else 4)).astype(np.float32)
        + np.float32(1 if len(shape) == 1 and "norm" in name and name.endswith("weight") else 0)
        for name, shape in shapes.items()
    }


def nomic() -> Tensors:
    return made(shapes_of("attn", lambda index: index % 2 == 1))


def jina() -> Tensors:
    """With an adapter for each matrix and table."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes_of("mixer", lambda _: False).items():
        if len(shape) == 1:
            shapes[f"roberta.{name}"] = shape
            continue
        module = f"roberta.{name.removesuffix('.weight')}"
        inputs, outputs = shape if "embeddings" in name else shape[::-1]
        a, b = (len(TASKS), RANK, inputs), (len(TASKS), outputs, RANK)
        if "embeddings" in name:
            a, b = (len(TASKS), inputs, RANK), (len(TASKS), RANK, outputs)
        shapes |= {f"{module}.{ORIGINAL}": shape, f"{module}.{LORA}A": a, f"{module}.{LORA}B": b}
    return made(shapes)


def merged(tensors: Tensors, task: int | None) -> Read:
    """The weights of a task; None: without an adapter."""

    def read(name: str) -> Tensor:
        module = f"roberta.{name.removesuffix('.weight')}"
        if f"{module}.{ORIGINAL}" not in tensors:
            return torch.from_numpy(tensors[f"roberta.{name}"])
        weight = torch.from_numpy(tensors[f"{module}.{ORIGINAL}"])
        if task is None:
            return weight
        a, b = (torch.from_numpy(tensors[f"{module}.{LORA}{kind}"][task]) for kind in "AB")
        return weight + (a @ b if "embeddings" in name else b @ a) * (2 / RANK)

    return read


def folder(path: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    own = {**config, "vocab_size": zoo.tokenizer("bert").vocab_size}
    zoo.changed_folder(zoo.native_folder("bert"), path, config=own)
    save_file(tensors, path / "model.safetensors")
    return path


def embedder(path: Path, threads: int = 1) -> Embedder:
    encoder = load_encoders([str(path)], ["it"], threads=threads).encoders["it"]
    assert isinstance(encoder, Embedder)
    return encoder


def texts() -> list[str]:
    return [*zoo.texts(8, most=20), " ".join((zoo.WORDS * 4)[:40])]


def assert_near(ours: Sequence[Floats], wanted: Sequence[Floats]) -> None:
    a, b = (np.stack(rows).astype(np.float64) for rows in (ours, wanted))
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert (1 - cosines).max() <= 1e-6
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(np.abs(b).max()))


def test_nomic_with_experts(tmp_path: Path) -> None:
    tensors = nomic()
    encoder = embedder(folder(tmp_path / "model", NOMIC, tensors))
    inputs = [encoder.encode(text) for text in texts()]
    ours = encoder.run("embed", inputs)
    assert_near(
        ours,
        [
            plain(lambda name: torch.from_numpy(tensors[name]), item.token_ids, "attn", 1e4, lambda i: i % 2 == 1)
            for item in inputs
        ],
    )
    for row, item in zip(ours, inputs, strict=True):
        np.testing.assert_array_equal(encoder.run("embed", [item])[0], row)
    two = embedder(tmp_path / "model", threads=2)
    np.testing.assert_array_equal(two.run("embed", inputs[::-1]), ours[::-1])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"activation_function": "swiglu", "mlp_fc1_bias": False, "mlp_fc2_bias": False}, "as there are experts"),
        ({"num_experts": 10**9}, "num_experts must be so few"),
        ({"moe_top_k": 6}, "at most the number of experts"),
        ({"expert_choice_router": True}, "expert_choice_router"),
        ({"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights"),
        ({"mlp_fc2_bias": False}, "mlp_fc2_bias"),
        ({"activation_function": "tanh"}, "activation_function must be"),
        ({"activation_function": ["gelu"]}, "activation_function must be"),
    ],
)
def test_experts_that_are_not_computed(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        embedder(folder(tmp_path / "model", {**NOMIC, **changed}, nomic()))


def test_tasks_of_jina(tmp_path: Path) -> None:
    tensors = jina()
    encoder = embedder(folder(tmp_path / "model", JINA, tensors))
    assert dict(encoder.prompts) == TASKS
    assert encoder.max_length == 64  # as the folder says
    inputs, wanted = [], []
    for number, name in enumerate([None, *TASKS]):
        read = merged(tensors, None if name is None else number - 1)
        for text in texts():
            inputs.append(encoder.encode(text, prompt_name=name))
            wanted.append(plain(read, inputs[-1].token_ids, "mixer", 2e4, lambda _: False))
    ours = encoder.run("embed", inputs)
    assert_near(ours, wanted)
    for row, item in zip(ours[::5], inputs[::5], strict=True):
        np.testing.assert_array_equal(encoder.run("embed", [item])[0], row)
    two = embedder(tmp_path / "model", threads=2)
    np.testing.assert_array_equal(two.run("embed", inputs[::-7]), ours[::-7])
    assert not np.allclose(encoder.run("embed", [inputs[-1]])[0], ours[len(texts()) - 1])
    with pytest.raises(InvalidRequestError, match=r"no prompt 'other'; it has retrieval.query, "):
        encoder.encode("a", prompt_name="other")
    plan = encoder.plan_scores(["tide"], ["wheel"])
    assert [item.adapter for item in plan.inputs] == [0, 1]


def test_gguf_files_of_nomic_with_experts(tmp_path: Path) -> None:
    """They lack the bias of the experts' sum. Matrices of a stack may be in blocks."""
    tensors = {name: tensor * (not name.endswith("experts.bias")) for name, tensor in nomic().items()}
    theirs = embedder(folder(tmp_path / "model", NOMIC, tensors))
    ours = embedder(gguf_encoders.write(tmp_path / "model", tmp_path / "model.gguf"))
    inputs = [theirs.encode(text) for text in texts()]
    wanted = theirs.run("embed", inputs)
    np.testing.assert_array_equal(ours.run("embed", inputs), wanted)

    def blocks(name: str, data: Floats) -> tuple[NDArray[Any], Any]:
        quantize = gguf_files.quantized(gguf.GGMLQuantizationType.Q8_0) if data.shape[-1] == 32 else None
        return (quantize or gguf_files.as_float32)(name, data)

    quantized = embedder(gguf_encoders.write(tmp_path / "model", tmp_path / "blocks.gguf", blocks))
    found = np.stack(quantized.run("embed", inputs))
    assert 0 < np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()


def test_jina_without_tasks(tmp_path: Path) -> None:
    """As its models for several vectors are: the same code, without adapters."""
    tensors = {name: tensor for name, tensor in jina().items() if LORA not in name}
    own = {name.removeprefix("roberta.").replace(ORIGINAL, "weight"): tensor for name, tensor in tensors.items()}
    config = {key: value for key, value in JINA.items() if not key.startswith(("lora", "task"))}
    encoder = embedder(folder(tmp_path / "model", config, own))
    inputs = [encoder.encode(text) for text in texts()]
    read = merged(tensors, None)
    assert_near(
        encoder.run("embed", inputs), [plain(read, item.token_ids, "mixer", 2e4, lambda _: False) for item in inputs]
    )
    assert inputs[0].adapter == EncoderInput(()).adapter
    file = embedder(gguf_encoders.write(tmp_path / "model", tmp_path / "model.gguf"))
    np.testing.assert_array_equal(file.run("embed", inputs), encoder.run("embed", inputs))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lora_adaptations": "one"}, "lora_adaptations must be a list of names"),
        ({"lora_adaptations": ["a", "a"]}, "all of them different"),
        ({"lora_adaptations": [str(i) for i in range(1000)]}, "up to 64 names"),
        ({"lora_adaptations": [str(i) for i in range(4)]}, "does not fit config.json"),
        ({"lora_rank": 4}, "does not fit config.json"),
        ({"position_embedding_type": "absolute"}, "lora_adaptations"),
    ],
)
def test_tasks_that_are_not_computed(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        embedder(folder(tmp_path / "model", {**JINA, **changed}, jina()))


def test_adapters_with_values_that_are_not_finite(tmp_path: Path) -> None:
    tensors = jina()
    tensors[f"roberta.embeddings.word_embeddings.{LORA}A"][1, 3] = np.nan
    with pytest.raises(ModelError, match="not finite"):
        embedder(folder(tmp_path / "table", JINA, tensors))
    tensors = jina()
    tensors[f"roberta.encoder.layers.1.mlp.fc2.{LORA}B"][2, 3] = np.inf
    with pytest.raises(ModelError, match="not finite"):
        embedder(folder(tmp_path / "matrix", JINA, tensors))


def test_token_ids_have_the_default_task_s_adapter(tmp_path: Path) -> None:
    plain_folder = folder(tmp_path / "plain", JINA, jina())
    settings = {"prompts": TASKS, "default_prompt_name": "text-matching"}
    changed = zoo.changed_folder(plain_folder, tmp_path / "model", config_sentence_transformers=settings)
    with LLM(str(changed)) as llm:
        [text] = llm.embed("the tide", use_tqdm=False)
        [ids] = llm.embed([text.prompt_token_ids], use_tqdm=False)
    assert ids.outputs.embedding == text.outputs.embedding
