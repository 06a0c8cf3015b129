"""NomicBERT (https://arxiv.org/abs/2402.01613): BERT with rope and a gated MLP, without biases. Or, as version 2
(https://arxiv.org/abs/2502.07972), with experts in some layers, plain MLPs and biases.
"""

from __future__ import annotations

from dataclasses import replace

from ...models.config import ConfigReader
from ...models.families.expert_parts import expert_count, experts_per_token
from ...models.module_tensors import fused_qkv
from ...models.rope import rope_from_config
from ...models.spec import ExpertsSpec, MlpSpec, ResidualBlockSpec, RouterSpec
from ...models.tensor_ref import TensorRef
from ..model import EmbeddingSpec, EncoderModel
from .parts import EMBEDDINGS, GATED_LAYER, Layout, Modules, encoder, layer_norm, post_norm_layer, two_way

# As the model's own code has them, and as transformers has them since 5.4.
_OWN_FIELDS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
_GATED = {"swiglu": "silu", "geglu": "gelu"}
_PLAIN = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_MODULES = {**EMBEDDINGS, **GATED_LAYER}


def model(architecture: str, config: ConfigReader) -> EncoderModel:
    """NomicBERT. Of its versions, the model's own code has all, and transformers the first."""
    own_code = config.raw("n_embd") is not None
    if own_code:
        config = _from_own(config)
    hidden = config.integer("hidden_size")
    config = config.with_defaults(rope_theta=1000.0, max_position_embeddings=2048)
    norm = layer_norm(config)
    attention = two_way(config, bias=own_code and config.flag("qkv_proj_bias", False))
    rope = rope_from_config(config, attention.head_dim, None)
    mlp = MlpSpec(
        config.integer("intermediate_size"),
        config.activation("hidden_act", "silu"),
        gated=not own_code or config.raw("activation_function") in _GATED,
        bias=own_code and config.flag("mlp_fc1_bias", False),
    )
    layer = post_norm_layer(replace(attention, rope=rope.spec), mlp, norm)
    experts = _experts(config, mlp) if own_code else None
    every = config.integer("moe_every_n_layers") if experts else 0
    layers = tuple(
        (layer[0], ResidualBlockSpec(experts, sum_norm=norm)) if experts and index % every == 1 else layer
        for index in range(config.num_layers("num_hidden_layers"))
    )
    own = {
        **_MODULES,
        **fused_qkv("attn.Wqkv", attention.q_size),
        "embedding_norm": "emb_ln",
        "o": "attn.out_proj",
        "attention_sum_norm": "norm1",
        **({"gate": "mlp.fc12", "up": "mlp.fc11"} if mlp.gated else {"up": "mlp.fc1"}),
        "down": "mlp.fc2",
        "mlp_sum_norm": "norm2",
        **(_modules_of(experts, hidden) if experts else {}),
    }
    prefixes = ("", "nomic_bert.")
    own_layout = Layout(own, "encoder.layers.", ("", "bert."))
    return encoder(
        hidden,
        layers,
        EmbeddingSpec(config.integer("vocab_size"), num_types=config.integer("type_vocab_size", 2), norm=norm),
        [own_layout] if experts else [Layout(_MODULES, "layers.", prefixes), own_layout],
        max_length=rope.max_positions,
    )


def _from_own(config: ConfigReader) -> ConfigReader:
    """The config with transformers' fields. Longer texts than in training would need another rope."""
    for name in ("rotary_scaling_factor", "rotary_emb_scale_base"):
        config.refuse(name, 0)
    for name in ("prenorm", "parallel_block", "use_rms_norm", "rotary_emb_interleaved", "causal"):
        config.refuse(name, False)
    config.refuse("rotary_emb_fraction", 1)
    activation = config.raw("activation_function")
    if not isinstance(activation, str) or activation not in (*_GATED, *_PLAIN):
        raise config.error("activation_function", " or ".join((*_GATED, *_PLAIN)))
    if activation in _GATED:
        for name in ("mlp_fc1_bias", "mlp_fc2_bias"):
            config.refuse(name, False)
    config.refuse("mlp_fc2_bias", config.flag("mlp_fc1_bias", False))
    return config.with_fields(
        **{name: config.raw(own) for name, own in _OWN_FIELDS.items()},
        hidden_act=_GATED.get(activation, activation),
        max_position_embeddings=config.integer("max_trained_positions", 2048),
    )


def _experts(config: ConfigReader, mlp: MlpSpec) -> ExpertsSpec | None:
    """Those in place of the MLP of every few layers. Their weights are not normalized, so they sum to less than 1."""
    if config.raw("moe_every_n_layers") in (None, 0):
        return None
    for name, harmless in (("expert_choice_router", False), ("num_shared_experts", 0), ("ffn_div", 1)):
        config.refuse(name, harmless)
    config.refuse("moe_normalize_expert_weights", False)
    if mlp.gated:
        raise config.error("activation_function", "one of " + ", ".join(_PLAIN) + ", as there are experts")
    count = expert_count(config, "num_experts")
    return ExpertsSpec(
        count,
        experts_per_token(config, count, "moe_top_k"),
        mlp.intermediate_size,
        mlp.activation,
        router=RouterSpec(normalize=False),
        gated=False,
        sum_bias=True,
    )


def _modules_of(experts: ExpertsSpec, hidden: int) -> Modules:
    """Where the experts lie: all of them in two matrices, those of `down` transposed."""
    size = experts.intermediate_size
    modules: dict[str, str | TensorRef] = {
        "router": "mlp.router.layer",
        "experts.bias": "mlp.experts.bias",
        "experts_sum_norm": "norm2",
    }
    for number in range(experts.num_experts):
        rows = (number * size, (number + 1) * size)
        modules[f"experts.{number}.up.weight"] = TensorRef("mlp.experts.mlp.w1", rows=rows)
        modules[f"experts.{number}.down.weight"] = TensorRef(
            "mlp.experts.mlp.w2", rows=rows, transpose_each=(size, hidden)
        )
    return modules
