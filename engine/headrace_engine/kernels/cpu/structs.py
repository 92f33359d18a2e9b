"""The structs of the native kernels' C interface, with the fields of attention.h, decoder.h and
recurrence.h. Pointers are stored as numbers: the code that fills a struct must keep the data that
it points to alive."""

import ctypes

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Batch(ctypes.Structure):
    """`headrace_batch` of attention.h."""

    _fields_ = [
        ("query_start", _POINTER),
        ("seq_lens", _POINTER),
        ("block_tables", _POINTER),
        ("slots", _POINTER),
        ("num_seqs", _INT),
        ("num_tokens", _INT),
        ("table_stride", _INT),
    ]


class Layer(ctypes.Structure):
    """`headrace_layer` of attention.h."""

    _fields_ = [
        ("num_heads", _INT),
        ("num_kv_heads", _INT),
        ("head_dim", _INT),
        ("block_size", _INT),
        ("window", _INT),
        ("is_bfloat16", _INT),
        ("storage", _INT),
        ("scale", _FLOAT),
        ("softcap", _FLOAT),
        ("key_scale", _FLOAT),
        ("value_scale", _FLOAT),
        ("sinks", _POINTER),
    ]


class PackedPanel(ctypes.Structure):
    """`headrace_packed_panel` of decoder.h."""

    _fields_ = [("data", _POINTER), ("kind", _INT)]


class Linear(ctypes.Structure):
    """`headrace_linear` of decoder.h."""

    _fields_ = [
        ("weight", _POINTER),
        ("panels", _POINTER),
        ("scales", _POINTER),
        ("zeros", _POINTER),
        ("bias", _POINTER),
        ("group", _INT),
        ("inputs", _INT),
        ("outputs", _INT),
    ]


# Kinds of activations.
SILU, GELU_TANH, CLAMPED_SWIGLU, SQUARED_RELU = range(4)


class Activation(ctypes.Structure):
    """`headrace_activation` of decoder.h."""

    _fields_ = [("kind", _INT), ("alpha", _FLOAT), ("limit", _FLOAT)]


class Experts(ctypes.Structure):
    """`headrace_experts` of decoder.h."""

    _fields_ = [
        ("gate_up", _POINTER),
        ("down", _POINTER),
        ("count", _INT),
        ("per_token", _INT),
        ("hidden", _INT),
        ("inner", _INT),
        ("interleaved", _INT),
        ("scaled_inputs", _INT),
        ("activation", Activation),
    ]


class LatentLayer(ctypes.Structure):
    """`headrace_latent_layer` of decoder.h."""

    _fields_ = [
        ("keys", _POINTER),
        ("values", _POINTER),
        ("query", Linear),
        ("query_norm", _POINTER),
        ("norm", _POINTER),
    ]


class DecoderLayer(ctypes.Structure):
    """`headrace_decoder_layer` of decoder.h."""

    _fields_ = [
        ("input_norm", _POINTER),
        ("attention_output_norm", _POINTER),
        ("mlp_norm", _POINTER),
        ("mlp_output_norm", _POINTER),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("query_scales", _POINTER),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("shared_gate", _POINTER),
        ("correction", _POINTER),
        ("experts_gate_up", _POINTER),
        ("experts_down", _POINTER),
        ("qkv", Linear),
        ("o", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("router", Linear),
        ("window", _INT),
        ("key_scale", _FLOAT),
        ("value_scale", _FLOAT),
        ("sinks", _POINTER),
        ("latent", _POINTER),
    ]


class Decoder(ctypes.Structure):
    """`headrace_decoder` of decoder.h."""

    _fields_ = [
        ("layers", _POINTER),
        ("embedding", _POINTER),
        ("embedding_panels", _POINTER),
        ("norm", _POINTER),
        ("lm_head", Linear),
        ("num_layers", _INT),
        ("hidden", _INT),
        ("inner", _INT),
        ("num_heads", _INT),
        ("num_kv_heads", _INT),
        ("head_dim", _INT),
        ("rotated", _INT),
        ("interleaved", _INT),
        ("wide_qk_norm", _INT),
        ("num_experts", _INT),
        ("experts_per_token", _INT),
        ("expert_inner", _INT),
        ("renormalize", _INT),
        ("plain_routing", _INT),
        ("sigmoid", _INT),
        ("expert_groups", _INT),
        ("kept_groups", _INT),
        ("group_best", _INT),
        ("scaled_inputs", _INT),
        ("activation", Activation),
        ("block_size", _INT),
        ("is_bfloat16", _INT),
        ("kv_storage", _INT),
        ("epsilon", _FLOAT),
        ("scale", _FLOAT),
        ("latent_epsilon", _FLOAT),
        ("attention_softcap", _FLOAT),
        ("logits_softcap", _FLOAT),
        ("embedding_scale", _FLOAT),
        ("expert_factor", _FLOAT),
    ]


class Step(ctypes.Structure):
    """`headrace_step` of decoder.h."""

    _fields_ = [
        ("input_ids", _POINTER),
        ("positions", _POINTER),
        ("logits_rows", _POINTER),
        ("caches", _POINTER),
        ("logits", _POINTER),
        ("num_logits", _INT),
        ("logits_stride", _INT),
        ("batch", Batch),
        ("layers", _POINTER),
        ("taps", _POINTER),
        ("tapped", _POINTER),
        ("num_taps", _INT),
    ]


class States(ctypes.Structure):
    """`headrace_states` of recurrence.h."""

    _fields_ = [
        ("pages", _POINTER * 2),
        ("page_bytes", _INT * 2),
        ("second", _INT),
        ("sources", _POINTER),
        ("targets", _POINTER),
        ("stride", _INT),
        ("fresh", _POINTER),
        ("token_start", _POINTER),
        ("run_start", _POINTER),
        ("run_end", _POINTER),
        ("write_start", _POINTER),
        ("writes", _POINTER),
        ("num_seqs", _INT),
        ("num_tokens", _INT),
    ]


class Rows(ctypes.Structure):
    """`headrace_rows` of recurrence.h."""

    _fields_ = [("data", _POINTER), ("stride", _INT)]


class Convolution(ctypes.Structure):
    """`headrace_convolution` of recurrence.h."""

    _fields_ = [
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("channels", _INT),
        ("size", _INT),
    ]


class Delta(ctypes.Structure):
    """`headrace_delta` of recurrence.h."""

    _fields_ = [
        ("convolution", Convolution),
        ("rates", _POINTER),
        ("dt_bias", _POINTER),
        ("norm", _POINTER),
        ("key_heads", _INT),
        ("value_heads", _INT),
        ("key_dim", _INT),
        ("value_dim", _INT),
        ("epsilon", _FLOAT),
    ]


class Mamba2(ctypes.Structure):
    """`headrace_mamba2` of recurrence.h."""

    _fields_ = [
        ("convolution", Convolution),
        ("rates", _POINTER),
        ("dt_bias", _POINTER),
        ("skip", _POINTER),
        ("norm", _POINTER),
        ("heads", _INT),
        ("head_dim", _INT),
        ("groups", _INT),
        ("state_size", _INT),
        ("norm_first", _INT),
        ("epsilon", _FLOAT),
    ]


class Mamba(ctypes.Structure):
    """`headrace_mamba` of recurrence.h."""

    _fields_ = [
        ("rates", _POINTER),
        ("skip", _POINTER),
        ("channels", _INT),
        ("state_size", _INT),
        ("stride", _INT),
    ]
