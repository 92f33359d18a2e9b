"""Any decoder that transformers supports, with our paged attention inside.

transformers' modelling code computes everything but attention: its AttentionInterface calls our
backend, which finds each token's sequence in the step's metadata. No mask function is registered
under our name, so transformers makes no mask. At load, a probe records what a model requires of
attention and compares the result with transformers' eager attention. Models that require more than
the interface offers are refused (position biases, chunked or recurrent layers, sinks).
"""

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ...attention.image_spans import attend_to_image
from ...checkpoints.checkpoint import Checkpoint
from ...core.attention_backend import AttentionBackend, LayerCache, LayerParams
from ...core.errors import CheckpointError, ConfigError
from ...operators.cpu import NativeOps
from ..base import BidirectionalSpan, ForwardBatch, KVShape
from ..context import pick_context
from ..linear.linear_maker import NO_INT8, computes_natively, pack_linear
from ..registry import LoadedModel, LoadOptions
from ..rotary.rope_lock import lock_rope
from .probe import Probe, eager_logits, probe_ids

logger = logging.getLogger(__name__)

# For models that are asked for by name and refused: the closest ones that are served.
CLOSEST = {
    "BloomForCausalLM": "GPT-NeoX (GPTNeoXForCausalLM)",
    "DeepseekV4ForCausalLM": "DeepSeek V3.2 (DeepseekV32ForCausalLM)",
    "FalconForCausalLM": "Falcon 3 (LlamaForCausalLM)",
    "GPTJForCausalLM": "GPT-NeoX (GPTNeoXForCausalLM)",
    "MptForCausalLM": "GPT-NeoX (GPTNeoXForCausalLM)",
    "StableLmForCausalLM": "Phi 2 (PhiForCausalLM)",
}
LAYER_KINDS = {"full_attention", "sliding_attention"}
# The decoder's part of the names in a multimodal checkpoint.
_PARTS = {r"^model\.language_model\.": "model."}
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


@dataclass(frozen=True, slots=True)
class _Step:
    batch: ForwardBatch
    caches: Sequence[LayerCache]

    @property
    def spans(self) -> tuple[BidirectionalSpan, ...]:
        """The rows that see later ones of their image, in layers with a window."""
        return () if self.batch.vision is None else self.batch.vision.spans


class PagedAttention:
    """The function that transformers calls for each layer. It probes until `layers` are known."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.probe: Probe | None = None
        self.layers: dict[int, int] = {}
        self.step: _Step | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, Hq, T, D], key and value [1, Hkv, T, D]; returns [1, T, Hq, Dv]."""
        params = LayerParams(
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=softcap,
            sliding_window=sliding_window,
        )
        if self.probe is not None:
            return self.probe.attend(module, query, key, value, attention_mask, params, options)
        assert self.step is not None, "attention was called outside a step"
        index = self.layers[id(module)]
        width, queries = value.shape[-1], _rows(query)
        cache, metadata = self.step.caches[index], self.step.batch.metadata_of(index)
        spans = self.step.spans if sliding_window is not None else ()
        # Attention may change the rows in place.
        seeing = [queries[span.rows].clone() for span in spans]
        attended = self._backend.forward(
            queries,
            _rows(key),
            F.pad(_rows(value), (0, key.shape[-1] - width)),
            cache,
            metadata,
            params,
        )
        for span, rows in zip(spans, seeing, strict=True):
            blocks = metadata.block_tables[span.sequence]
            attended[span.rows] = attend_to_image(
                self._backend, rows, cache, blocks, params, span.first
            )
        return attended[..., :width].unsqueeze(0), None


class TransformersModel:
    """A causal language model of transformers, called without a cache of its own."""

    def __init__(
        self,
        model: Any,
        attention: PagedAttention,
        kv_shapes: tuple[KVShape, ...],
        hidden_states: bool = False,
    ) -> None:
        self._model, self._attention, self.kv_shapes = model, attention, kv_shapes
        self._hidden_states = hidden_states
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        keeps = self._keeps_rows and not self._hidden_states
        rows = {"logits_to_keep": batch.logits_rows} if keeps else {}
        model = self._model.base_model if self._hidden_states else self._model
        self._attention.step = _Step(batch, caches)
        try:
            output = model(
                **self._inputs(batch),
                position_ids=batch.positions[None],
                use_cache=False,
                **rows,
            )
        finally:
            self._attention.step = None
        found = output.last_hidden_state if self._hidden_states else output.logits
        wanted: torch.Tensor = found[0]
        return wanted if keeps else wanted.index_select(0, batch.logits_rows)

    def _inputs(self, batch: ForwardBatch) -> dict[str, torch.Tensor]:
        """What the model reads: token ids, or with images the embeddings in their place."""
        ids, vision = batch.input_ids[None], batch.vision
        if vision is None:
            return {"input_ids": ids}
        ids = ids.index_fill(1, vision.rows, self._model.config.pad_token_id or 0)
        embeddings = self._model.get_input_embeddings()(ids)
        embeddings[0].index_copy_(0, vision.rows, vision.embeddings[0].to(embeddings.dtype))
        inputs = {"inputs_embeds": embeddings}
        if getattr(self._model.config, "hidden_size_per_layer_input", None):
            inputs["per_layer_inputs"] = self._model.base_model.get_per_layer_inputs(ids)
        return inputs


def load(checkpoint: Checkpoint, options: LoadOptions) -> LoadedModel:
    """Loads a model. Raises ConfigError, with the reason, if it cannot be served exactly."""
    check_quantization(checkpoint, options)
    config = _read_config(checkpoint)
    length = _context(checkpoint, config, options.positions)
    attention = PagedAttention(options.attention)
    model = _read_model(checkpoint, options, config, _register(attention))
    try:
        lock_rope(model, length)
    except ConfigError as error:
        raise refuse(checkpoint, str(error)) from error
    probe = _probe(checkpoint, model, attention, options)
    shapes = tuple(probe.shapes.values())
    pack(model, options)
    served = TransformersModel(model, attention, shapes, options.hidden_states)
    return LoadedModel(served, length, tuple(probe.windows))


def check_quantization(checkpoint: Checkpoint, options: LoadOptions) -> None:
    """Raises ConfigError for quantised weights, and for int8 without native kernels."""
    if options.quantization == "int8" and not computes_natively(options.ops, options.dtype):
        raise ConfigError(NO_INT8)
    if options.quantization not in ("none", "int8"):
        raise ConfigError(
            f"quantization {options.quantization} needs one of the native models, and "
            f"{checkpoint.architecture} is not: use quantization none"
        )
    if checkpoint.quantization_config:
        raise ConfigError(
            f"{checkpoint.folder}: {checkpoint.architecture} is served through transformers, which "
            "supports unquantised weights only: use a checkpoint without quantization_config"
        )


def _context(checkpoint: Checkpoint, config: Any, wanted: int | None) -> int:
    trained = getattr(config, "max_position_embeddings", None)
    if not isinstance(trained, int):
        if wanted is None:
            raise refuse(
                checkpoint, "config.json has no max_position_embeddings: set max_model_len"
            )
        return wanted
    rope = getattr(config, "rope_parameters", None) or {}
    return pick_context(wanted, trained, str(rope.get("rope_type")), rope)


def auto_config(checkpoint: Checkpoint) -> Any:
    """Reads config.json through transformers. Raises ConfigError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ConfigError(f"{checkpoint.folder / 'config.json'}: {error}") from error


def _read_config(checkpoint: Checkpoint) -> Any:
    config = auto_config(checkpoint).get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise refuse(checkpoint, "it is an encoder-decoder")
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds <= LAYER_KINDS:
        others = ", ".join(sorted(map(str, kinds - LAYER_KINDS)))
        raise refuse(checkpoint, f"layer_types has {others}")
    return config


def _read_model(checkpoint: Checkpoint, options: LoadOptions, config: Any, name: str) -> Any:
    from transformers import AutoModelForCausalLM

    from ..weights.weights import scan

    kinds: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in kinds:
        raise refuse(
            checkpoint, f"transformers has no causal language model for {config.model_type}"
        )
    kind = kinds[type(config)]
    if not (kind._supports_attention_backend and kind._can_set_attn_implementation()):
        raise refuse(checkpoint, "its code in transformers does not use the attention interface")
    scan(checkpoint.folder)  # safetensors only, with our messages
    model, report = from_pretrained(kind, checkpoint, options, config, name)
    unneeded = _head_keys(model) if options.hidden_states else set()
    check_missing(checkpoint, report, unneeded.__contains__)
    return model.to(options.device).eval()


def from_pretrained(
    kind: Any,
    checkpoint: Checkpoint,
    options: LoadOptions,
    config: Any,
    attention: str | None = None,
) -> tuple[Any, Mapping[str, Any]]:
    """Loads a model of a transformers class, and returns it with the loading report.

    `attention` None lets the library choose. Raises CheckpointError.
    """
    try:
        model, report = kind.from_pretrained(
            checkpoint.folder,
            config=config,
            dtype=options.dtype,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_missing` reports them by name
            key_mapping=_PARTS if "text_config" in checkpoint.config else None,
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint.folder}: {error}") from error
    return model, report


def check_missing(
    checkpoint: Checkpoint, report: Mapping[str, Any], unneeded: Callable[[str], bool]
) -> None:
    """Raises CheckpointError for weights that do not fit, or are missing and needed."""
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        found = set(map(str, report.get(problem) or ()))
        if problem == "missing_keys":
            found = {name for name in found if not unneeded(name)}
        if found:
            named = ", ".join(sorted(found)[:5])
            raise CheckpointError(f"{checkpoint.folder}: {problem.replace('_', ' ')}: {named}")


def _head_keys(model: Any) -> set[str]:
    """The parameters outside the bare model, which hidden states do not need."""
    bare = f"{model.base_model_prefix}."
    return {name for name, _ in model.named_parameters() if not name.startswith(bare)}


def pack(model: torch.nn.Module, options: LoadOptions) -> None:
    """Lays the weights of linear layers out for the machine, except shared ones."""
    executor = options.ops.executor if isinstance(options.ops, NativeOps) else None
    quantize = options.quantization == "int8"
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    for module in model.modules():
        if type(module) is not torch.nn.Linear or owners[id(module.weight)] > 1:
            continue
        packed = pack_linear(module.weight.detach(), module.bias, executor, quantize)
        if packed is not None:
            module.weight = torch.nn.Parameter(module.weight.new_empty(0), requires_grad=False)
            setattr(module, "forward", packed.__call__)  # noqa: B010  mypy: a method is assigned


def _register(attention: PagedAttention) -> str:
    """Registers the attention under a name of its own: transformers' registry is process-wide."""
    from transformers import AttentionInterface

    name = f"headrace_{id(attention):x}"
    AttentionInterface.register(name, attention)
    return name


def _probe(
    checkpoint: Checkpoint, model: Any, attention: PagedAttention, options: LoadOptions
) -> Probe:
    """Runs two short sequences as one ragged batch through the model and compares with eager
    attention."""
    ids, positions, sizes = probe_ids(model.config.vocab_size, options.device)
    attention.probe = probe = Probe(sizes)
    ours = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    attention.probe = None
    _check_probe(checkpoint, model.config, probe)
    eager = eager_logits(model, ids, sizes)
    tolerance = PROBE_TOLERANCE[options.dtype] * float(eager.float().abs().max().clamp_min(1e-6))
    distance = float((ours.float() - eager.float()).abs().max())
    if not distance <= tolerance:
        raise refuse(
            checkpoint,
            f"its logits with paged attention differ from transformers' by {distance:.2g}: its "
            "attention needs something that the attention interface does not pass on",
        )
    attention.layers = {key: index for index, key in enumerate(probe.shapes)}
    return probe


def _check_probe(checkpoint: Checkpoint, config: Any, probe: Probe) -> None:
    if probe.problem is not None:
        raise refuse(checkpoint, probe.problem)
    if len(probe.shapes) != config.num_hidden_layers:
        raise refuse(
            checkpoint,
            f"{len(probe.shapes)} of its {config.num_hidden_layers} layers use attention",
        )
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        kinds = ["sliding_attention" if window is not None else "full_attention"]
    slides = "sliding_attention" in kinds and window is not None
    if slides and not any(probe.windows):
        raise refuse(checkpoint, "its sliding window is not passed to the attention interface")


def refuse(checkpoint: Checkpoint, reason: str) -> ConfigError:
    """The error that gives the reason, and the closest model that is served, if there is one."""
    name = checkpoint.architecture
    instead = f"; the closest model that is served is {CLOSEST[name]}" if name in CLOSEST else ""
    return ConfigError(f"{checkpoint.folder}: {name} cannot be served: {reason}{instead}")


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """[1, H, T, D] -> [T, H, D]"""
    return heads[0].transpose(0, 1)
