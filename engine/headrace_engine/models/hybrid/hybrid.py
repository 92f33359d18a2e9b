"""Loads a hybrid decoder from a checkpoint."""

from collections.abc import Collection

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.fields import Fields
from ...checkpoints.loading import LoadProgress
from ...checkpoints.tensor_files import scan
from ...core.errors import ConfigError
from ..draft_heads.base import HeadOptions
from ..draft_heads.target import RecurrentHeadTarget
from ..layout import plain_layout
from ..linear.linear_maker import quantizes
from ..quantization.registry import find_format
from ..registry import LoadedModel, LoadOptions
from ..weights.weights import WeightReader
from .adapters import AdaptedLayers
from .bamba import Bamba
from .decoder import HybridDecoder, HybridStates, HybridWeights
from .falcon_h1 import FalconH1
from .family import HEAD, Family, Parts
from .granite_hybrid import GraniteHybrid
from .jamba import Jamba
from .kimi_linear import KimiLinear
from .lfm2 import Lfm2, Lfm2Moe
from .mamba_decoders import FalconMamba, Mamba, Mamba2
from .mtp import HybridMTPHead
from .nemotron_h import NemotronH
from .qwen3_5 import Qwen35, Qwen35Moe
from .qwen3_next import Qwen3Next
from .ranks import HybridCuts, ParallelHybridDecoder, ParallelHybridMTPHead
from .tensors import ExpectedTensors, StoredTensors

FAMILIES: dict[str, type[Family]] = {
    "BambaForCausalLM": Bamba,
    "FalconH1ForCausalLM": FalconH1,
    "FalconMambaForCausalLM": FalconMamba,
    "GraniteMoeHybridForCausalLM": GraniteHybrid,
    "JambaForCausalLM": Jamba,
    "KimiLinearForCausalLM": KimiLinear,
    "Lfm2ForCausalLM": Lfm2,
    "Lfm2MoeForCausalLM": Lfm2Moe,
    "Mamba2ForCausalLM": Mamba2,
    "MambaForCausalLM": Mamba,
    "NemotronHForCausalLM": NemotronH,
    "Qwen3NextForCausalLM": Qwen3Next,
    "Qwen3_5ForCausalLM": Qwen35,
    "Qwen3_5ForConditionalGeneration": Qwen35,
    "Qwen3_5MoeForCausalLM": Qwen35Moe,
    "Qwen3_5MoeForConditionalGeneration": Qwen35Moe,
}
# Tensors of other parts, which are not read: heads that predict several tokens, and images.
IGNORED = ("mtp.", "model.visual.")
HEAD_PROJECTION = "mtp.fc.weight"


def load(checkpoint: Checkpoint, options: LoadOptions) -> LoadedModel:
    """Loads the decoder. Raises ConfigError or CheckpointError naming the wrong field, file or
    tensor."""
    _check_options(checkpoint, options)
    found = find_format(checkpoint, options.quantization, options.device)
    eight = options.quantization == "int8" or (found is not None and found.integer_weights)
    quantize = quantizes(options.ops, options.dtype, options.quantization, eight)
    family = read_family(checkpoint)
    length = family.context(options.positions)
    parts = Parts(options.attention, options.ops, options.dtype)
    stored = scan(checkpoint.folder) if options.tensors is None else options.tensors
    family.look_at(stored)
    if options.shard is not None:
        family.check_ranks(options.shard.size, options.shard.expert_parallel)
    shard = options.shard
    cuts = None if shard is None else HybridCuts(family, shard)
    adapters = AdaptedLayers(family.layers, cuts, options.enable_lora)
    expected = ExpectedTensors(options.dtype, stored, adapters)
    shapes = family.build(expected, parts)
    if options.draft_head is not None:
        _check_head(checkpoint, options.draft_head, family, stored)
        family.build_head(expected, parts, shapes)
    ignored = [name for name in stored if name.startswith(IGNORED)]
    if family.tied:
        ignored.append(HEAD)
    own = family if shard is None else family.divided(shard)
    with LoadProgress() as progress:
        where = (checkpoint.folder, options.dtype, options.device)
        reader = WeightReader(*where, plain_layout, progress, found, cuts, stored)
        reader.check(expected.shapes, ignored)
        tensors = StoredTensors(reader, options.ops, adapters, quantize)
        weights = own.build(tensors, parts)
        rotary = family.rotary(length, options.device)
        made = (weights, options.ops, rotary, adapters)
        model = (
            HybridDecoder(*made)
            if shard is None
            else ParallelHybridDecoder(*made, shard=shard, vocabulary=family.vocab)
        )
        if options.draft_head is not None:
            read = (own.build_head(tensors, parts, weights), options.ops, rotary)
            head = (
                HybridMTPHead(*read)
                if shard is None
                else ParallelHybridMTPHead(*read, shard=shard, vocabulary=family.vocab)
            )
            target = _target(model, weights, family, options)
            return LoadedModel(target, length, (None,) * len(model.kv_shapes), draft_head=head)
    # Of layers without KV no position is read.
    window = 1 if weights.without_kv else None
    return LoadedModel(model, length, (window,) * len(model.kv_shapes))


def _target(
    model: HybridDecoder, weights: HybridWeights, family: Family, options: LoadOptions
) -> RecurrentHeadTarget:
    return RecurrentHeadTarget(
        HybridStates(model),
        model.to_logits,
        model.vocab_size,
        family.hidden,
        options.dtype,
        state_tensors=weights.state_tensors,
        num_state_layers=weights.num_state_layers,
    )


def _check_head(
    checkpoint: Checkpoint, head: HeadOptions, family: Family, stored: Collection[str]
) -> None:
    """Raises ConfigError if the checkpoint has no head of this kind."""
    if head.method != "mtp" or not family.has_head:
        raise ConfigError(
            f"speculative_config.method {head.method} does not support "
            f"{checkpoint.architecture}: use method ngram"
        )
    if HEAD_PROJECTION not in stored:
        raise ConfigError(
            f"speculative_config.method is mtp, but {checkpoint.folder} has no tensor "
            f"{HEAD_PROJECTION}: the layer was left out when the checkpoint was made"
        )


def read_family(checkpoint: Checkpoint) -> Family:
    """The checkpoint's shape. Raises ConfigError for fields that are not supported."""
    fields = Fields(checkpoint.folder / "config.json", checkpoint.config)
    return FAMILIES[checkpoint.architecture](fields)


def _check_options(checkpoint: Checkpoint, options: LoadOptions) -> None:
    """Raises ConfigError for what recurrent layers do not support."""
    refused = {
        "task embed": options.hidden_states,
        "deterministic": options.deterministic,
        "load_format dummy": options.load_format == "dummy",
    }
    for name, wanted in refused.items():
        if wanted:
            raise ConfigError(
                f"{checkpoint.folder}: {checkpoint.architecture} has recurrent layers, which do "
                f"not support {name}: leave it out"
            )
