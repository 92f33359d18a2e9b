"""GGUF files, written with the library gguf as llama.cpp's converter writes them.

Needs no torch. Names, values and the order of Llama's rows follow llama.cpp's conversion scripts;
shares no code with Headrace.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from .gguf_blocks import PACKERS

Tensors = Mapping[str, np.ndarray]
# The type of a tensor by llama.cpp's name for it.
TypeOf = Callable[[str], str]
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def write_gguf(
    path: Path, values: Mapping[str, Any], tensors: Tensors, type_of: TypeOf = lambda _: "F32"
) -> Path:
    """Writes the metadata and tensors; matrices get the types of `type_of`, all others F32."""
    writer = GGUFWriter(path, values["general.architecture"])
    for key, value in values.items():
        if key != "general.architecture":  # which the writer adds itself
            _add(writer, key, value)
    for name, tensor in tensors.items():
        kind = "F32" if tensor.ndim < 2 else type_of(name)
        packed, number = pack(tensor, kind), GGMLQuantizationType[kind]
        writer.add_tensor(name, packed, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](key, value)


def pack(tensor: np.ndarray, kind: str) -> np.ndarray:
    """A float32 tensor in ggml's type of this name."""
    if kind in PACKERS:
        rows = PACKERS[kind](tensor.reshape(-1, tensor.shape[-1]).astype(np.float64))
        return rows.reshape(*tensor.shape[:-1], -1)
    return quantize(tensor, GGMLQuantizationType[kind])


def model_values(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The metadata of a decoder with this config.json."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    rope = config.get("rope_parameters") or {}
    found = {
        "general.architecture": architecture,
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": hidden,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        found["rope.scaling.type"] = rope["rope_type"]
        found["rope.scaling.factor"] = float(rope["factor"])
    if rope.get("rope_type") == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        found["expert_count"] = experts
        found["expert_used_count"] = config["num_experts_per_tok"]
    if "moe_intermediate_size" in config:
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if "shared_expert_intermediate_size" in config:
        found["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    return {
        key if key.startswith("general.") else f"{architecture}.{key}": value
        for key, value in found.items()
    }


def byte_level_values(
    tokenizer: Mapping[str, Any], pre: str, vocab_size: int, **changes: Any
) -> dict[str, Any]:
    """The metadata of a byte-level tokenizer.json, padded to `vocab_size` tokens."""
    ids = dict(tokenizer["model"]["vocab"])
    added = {each["content"]: each for each in tokenizer["added_tokens"]}
    ids |= {text: each["id"] for text, each in added.items()}
    tokens = {index: text for text, index in ids.items()}
    texts = [tokens.get(index, f"[PAD{index}]") for index in range(vocab_size)]
    types = [
        _UNUSED
        if index not in tokens
        else _NORMAL
        if text not in added
        else _CONTROL
        if added[text]["special"]
        else _USER_DEFINED
        for index, text in enumerate(texts)
    ]
    merges = [_joined(merge) for merge in tokenizer["model"]["merges"]]
    return _keys(model="gpt2", pre=pre, tokens=texts, token_type=types, merges=merges) | _keys(
        **changes
    )


def _joined(merge: str | Iterable[str]) -> str:
    return merge if isinstance(merge, str) else " ".join(merge)


def sentencepiece_values(
    pieces: Mapping[str, float], bytes_: bool = True, **changes: Any
) -> dict[str, Any]:
    """The metadata of a SentencePiece model: Llama's three special tokens, one for each byte, and
    `pieces` with their scores."""
    texts, scores = ["<unk>", "<s>", "</s>"], [0.0] * 3
    types = [_UNKNOWN, _CONTROL, _CONTROL]
    if bytes_:
        texts += [f"<0x{byte:02X}>" for byte in range(256)]
        scores += [0.0] * 256
        types += [_BYTE] * 256
    texts += pieces
    scores += pieces.values()
    types += [_NORMAL] * len(pieces)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return _keys(model="llama", pre="default", tokens=texts, scores=scores, token_type=types) | (
        _keys(**ids, **changes)
    )


def _keys(**values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def tiny_tensors(vocab_size: int, hidden: int = 32) -> dict[str, np.ndarray]:
    """An embedding, which is all that a tokenizer's file needs of a model."""
    return {"token_embd.weight": np.zeros((vocab_size, hidden), dtype=np.float32)}


TINY = {
    "vocab_size": 0,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def write_tokenizer_gguf(path: Path, values: Mapping[str, Any], **changes: Any) -> Path:
    """A file with this tokenizer and hardly a model; `changes` are further keys, with __ for a
    dot."""
    further = {key.replace("__", "."): value for key, value in changes.items()}
    rows = len(values["tokenizer.ggml.tokens"])
    every = {**model_values(TINY, "llama"), **values, **further}
    return write_gguf(path, every, tiny_tensors(rows))


def read_tokenizer(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return content
