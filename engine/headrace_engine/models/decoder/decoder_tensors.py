"""The tensors of a native decoder's checkpoint, by Llama's names for them."""

from dataclasses import astuple, dataclass

from ...checkpoints.config import ExpertsConfig, IndexConfig, LatentConfig, ModelConfig
from ...checkpoints.tensor_files import Shape

# A mixture beside a layer's MLP.
SHORTCUT = "shortcut"
# Parts that predict further tokens, besides layers that follow the decoder's own.
_ERNIE_DRAFTS = tuple(f"mtp_{name}" for name in ("block", "emb_norm", "hidden_norm", "linear_proj"))
_DRAFTS = ("mtp", "mtp_layers", *_ERNIE_DRAFTS)


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Names and shapes of a checkpoint's tensors, under Llama's names."""
    hidden = config.hidden_size
    expected: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        expected |= {prefix + name: shape for name, shape in _layer_tensors(config, index).items()}
    expected["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        expected["lm_head.weight"] = (config.vocab_size, hidden)
    return expected


@dataclass(frozen=True, slots=True)
class NormNames:
    """The names of a layer's norm weights within the layer; None: it has no such norm."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None

    @classmethod
    def of(cls, config: ModelConfig) -> "NormNames":
        attention, mlp = "post_attention_layernorm.weight", "pre_feedforward_layernorm.weight"
        if not config.output_norms:
            return cls("input_layernorm.weight", None, attention, None)
        after = "post_feedforward_layernorm.weight"
        if not config.input_norms:
            return cls(None, attention, None, after)
        return cls("input_layernorm.weight", attention, mlp, after)


def first_product(config: ModelConfig) -> tuple[str, ...]:
    """The matrices of a layer's first product, which are stacked."""
    if config.latent is None:
        return ("q_proj", "k_proj", "v_proj")
    query = "q_proj" if config.latent.query_rank is None else "q_a_proj"
    return (query, "kv_a_proj_with_mqa")


def _layer_tensors(config: ModelConfig, index: int) -> dict[str, Shape]:
    hidden, dim = config.hidden_size, config.head_dim
    heads, kv_heads, width = config.num_heads, config.kv_heads(index), config.value_width
    q, kv = heads * dim, kv_heads * dim
    norms = astuple(NormNames.of(config))
    found: dict[str, Shape] = {name: (hidden,) for name in norms if name is not None}
    if config.latent is None:
        found |= _matrix("self_attn.q_proj", q, hidden, config.qkv_bias)
        found |= _matrix("self_attn.k_proj", kv, hidden, config.qkv_bias)
        found |= _matrix("self_attn.v_proj", kv_heads * width, hidden, config.qkv_bias)
        found |= _matrix("self_attn.o_proj", hidden, heads * width, config.o_bias)
    else:
        found |= _latent_tensors(config.latent, config.index_of(index), heads, hidden)
    if config.qk_norm:
        widths = (q, kv) if config.wide_qk_norm else (dim, dim)
        found["self_attn.q_norm.weight"], found["self_attn.k_norm.weight"] = zip(widths)
    if config.has_sinks(index):
        found["self_attn.sinks"] = (heads,)
    if config.experts is not None and config.experts.sparse[index]:
        return found | _moe_tensors(config, config.experts, "mlp")
    found |= _mlp_tensors("mlp", hidden, config.intermediate_size, config.mlp_bias)
    if config.has_shortcut(index) and config.experts is not None:
        found |= _moe_tensors(config, config.experts, SHORTCUT)
    return found


def _latent_tensors(
    latent: LatentConfig, index: IndexConfig | None, heads: int, hidden: int
) -> dict[str, Shape]:
    queries, found = heads * latent.query_width, dict[str, Shape]()
    if latent.query_rank is None:
        found["self_attn.q_proj.weight"] = (queries, hidden)
    else:
        found["self_attn.q_a_proj.weight"] = (latent.query_rank, hidden)
        found["self_attn.q_a_layernorm.weight"] = (latent.query_rank,)
        found["self_attn.q_b_proj.weight"] = (queries, latent.query_rank)
    expanded = heads * (latent.plain + latent.value)
    return (
        found
        | _index_tensors(latent, index, hidden)
        | {
            "self_attn.kv_a_proj_with_mqa.weight": (latent.width, hidden),
            "self_attn.kv_a_layernorm.weight": (latent.rank,),
            "self_attn.kv_b_proj.weight": (expanded, latent.rank),
            "self_attn.o_proj.weight": (hidden, heads * latent.value),
        }
    )


def _index_tensors(
    latent: LatentConfig, index: IndexConfig | None, hidden: int
) -> dict[str, Shape]:
    if index is None:
        return {}
    assert latent.query_rank is not None
    return {
        "self_attn.indexer.wq_b.weight": (index.heads * index.width, latent.query_rank),
        "self_attn.indexer.wk.weight": (index.width, hidden),
        "self_attn.indexer.k_norm.weight": (index.width,),
        "self_attn.indexer.k_norm.bias": (index.width,),
        "self_attn.indexer.weights_proj.weight": (index.heads, hidden),
    }


def _moe_tensors(config: ModelConfig, experts: ExpertsConfig, prefix: str) -> dict[str, Shape]:
    hidden, inner, bias = config.hidden_size, experts.intermediate_size, experts.bias
    found = _matrix(f"{prefix}.gate", experts.choices, hidden, bias)
    if experts.correction:
        row = (experts.choices,)  # of which ERNIE stores a matrix
        name = f"{prefix}.gate.e_score_correction_bias"
        found[name] = (1, *row) if config.layout == "ernie" else row
    for index in range(experts.count):
        found |= _mlp_tensors(f"{prefix}.experts.{index}", hidden, inner, bias)
    if experts.shared_size is not None:
        found |= _mlp_tensors(f"{prefix}.shared_expert", hidden, experts.shared_size)
        if experts.shared_gate:
            found[f"{prefix}.shared_expert_gate.weight"] = (1, hidden)
    return found


def _mlp_tensors(prefix: str, hidden: int, inner: int, bias: bool = False) -> dict[str, Shape]:
    return {
        **_matrix(f"{prefix}.gate_proj", inner, hidden, bias),
        **_matrix(f"{prefix}.up_proj", inner, hidden, bias),
        **_matrix(f"{prefix}.down_proj", hidden, inner, bias),
    }


def _matrix(name: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if bias else weight


def ignored_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Names that are not read, and prefixes of such names, which end in a dot.

    A tied output matrix may be stored a second time; layers that predict further tokens follow the
    decoder's own. transformers stores matrices of experts that compute nothing. A vision tower may
    lie beside a decoder that has no prefix of its own.
    """
    drafts = range(config.num_layers, config.num_layers + config.draft_layers)
    ignored = ["visual."] if config.multimodal else []
    ignored += [f"model.{name}." for name in _DRAFTS]
    ignored += [f"model.layers.{index}." for index in drafts]
    if config.experts is not None and config.experts.zero:
        unused = range(config.experts.count, config.experts.choices)
        layers = [layer for layer in range(config.num_layers) if config.has_shortcut(layer)]
        ignored += [
            f"model.layers.{layer}.{SHORTCUT}.experts.{index}."
            for layer in layers
            for index in unused
        ]
    return ("lm_head.weight", *ignored) if config.tie_word_embeddings else tuple(ignored)
