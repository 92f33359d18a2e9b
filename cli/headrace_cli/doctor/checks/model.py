"""Checks whether an engine could load the model's folder or hub id. Reads no weights."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace_common.text.checkpoint import local_source
from headrace_common.text.errors import TokenizerError
from headrace_common.text.gguf.files import find_gguf, is_gguf, read_gguf_configs
from headrace_common.text.gguf.hub import hub_file
from headrace_common.text.hub_errors import transport_errors

from ...errors import UsageError
from .finding import Finding, Level, fail, ok, warning

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_SECONDS = 5.0
# Limits of safetensors: the longest header that its library reads, and the header's entry that is
# not a tensor.
_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
_TO_SAFETENSORS = "convert them to *.safetensors, or take another revision of the model"
# A model that begins like this can only be a folder.
_PATHS = (".", "~", "/")


def check(model: str) -> Iterator[Finding]:
    folder = _folder(model)
    try:
        file = _gguf(model)
    except TokenizerError as error:
        yield fail("model", str(error), "give the file's path")
        return
    if file is not None:
        yield from _check_gguf(file)
    elif folder is not None:
        yield from _check_folder(folder)
    elif _is_file(model):
        yield fail("model", f"{model} is a file", "give the folder that it is in")
    elif _is_hub_id(model):
        yield from _check_hub(model)
    else:
        yield fail(
            "model",
            f"{model} is neither a folder nor a hub id",
            "give the folder with config.json and *.safetensors, a GGUF file, or an id such as "
            "Qwen/Qwen3-0.6B",
        )


def refuse_unusable(model: str) -> None:
    """Raises UsageError if it is clear without the network that no engine can load the model."""
    if _folder(model) is None and _is_hub_id(model) and not _is_file(model):
        return
    for finding in check(model):
        if finding.level is Level.FAIL:
            raise UsageError(finding.detail, finding.remedy)


def weight_bytes(model: str) -> int | None:
    """The size of the safetensors files, or of the GGUF file; None if they are not on this
    machine."""
    try:
        file = _gguf(model)
    except TokenizerError:
        return None
    if file is not None:
        return file.stat().st_size
    folder = _folder(model) or (_cached(model) if _is_hub_id(model) else None)
    if folder is None:
        return None
    if is_gguf(folder):
        return folder.stat().st_size
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None


def _is_hub_id(model: str) -> bool:
    if model.startswith(_PATHS):
        return False
    return _HUB_ID.fullmatch(model) is not None or hub_file(model) is not None


def _is_file(model: str) -> bool:
    return Path(model).expanduser().is_file()


def _folder(model: str) -> Path | None:
    path = Path(local_source(model)).expanduser()
    return path if path.is_dir() else None


def _gguf(model: str) -> Path | None:
    """The GGUF file that `model` is, or that its folder has instead of safetensors. Raises
    TokenizerError if the folder has several."""
    path, folder = Path(model).expanduser(), _folder(model)
    if folder is not None:
        return find_gguf(folder)
    return path if is_gguf(path) else None


def _check_gguf(file: Path) -> Iterator[Finding]:
    try:
        _, config, _ = read_gguf_configs(file)
    except TokenizerError as error:
        yield fail("model", str(error), "take another file of this model")
        return
    types = config.get("quantization_config", {}).get("types", [config["dtype"]])
    size = file.stat().st_size / 2**20
    architecture = config["architectures"][0]
    yield ok("model", f"{file}: {architecture}, {', '.join(types)}, {size:.0f} MiB")


def _check_folder(folder: Path) -> Iterator[Finding]:
    try:
        config: Any = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        yield fail("model", f"{folder} has no config.json", "give the folder of a HF checkpoint")
        return
    except (OSError, ValueError) as error:
        yield fail("model", f"{folder / 'config.json'}: {error}", "download the checkpoint again")
        return
    if _only_pickled(folder):
        detail = f"{folder} has only pickled weights (*.bin), which are refused"
        yield fail("model", detail, _TO_SAFETENSORS)
        return
    lacking = _lacking(folder) or _cut_short(folder)
    if lacking:
        yield fail("model", f"{folder} has {lacking}", "download the whole checkpoint again")
        return
    architecture = ", ".join(config.get("architectures") or ["unknown architecture"])
    size = (weight_bytes(str(folder)) or 0) / 2**20
    yield ok("model", f"{folder}: {architecture}, {size:.0f} MiB")


def _only_pickled(folder: Path) -> bool:
    return any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors"))


def _lacking(folder: Path) -> str:
    index = folder / "model.safetensors.index.json"
    if not any(folder.glob("*.safetensors")):
        return "no *.safetensors"
    if index.exists():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            return f"an unreadable {index.name}"
        if absent := sorted(name for name in shards if not (folder / name).is_file()):
            return f"no {absent[0]}, which {index.name} names"
    return "" if (folder / "tokenizer.json").exists() else "no tokenizer.json"


def _cut_short(folder: Path) -> str:
    """The problem of a safetensors file that is shorter than its header says."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            wanted = _whole_bytes(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return f"an unreadable {path.name}"
        if (size := path.stat().st_size) < wanted:
            return f"{size} of the {wanted} bytes of {path.name}"
    return ""


def _whole_bytes(path: Path) -> int:
    """The complete size: the 8 bytes of the header's length, the header, and the tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= _HEADER_BYTES:
            raise ValueError("no header")
        header = json.loads(file.read(length))
    ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != _METADATA]
    return 8 + length + max(ends, default=0)


def _check_hub(model: str) -> Iterator[Finding]:
    """Checks a hub id, which is usable if its files are cached or the hub has it."""
    cached, named = _cached(model), hub_file(model)
    if cached is not None:
        yield from check(str(cached))
        return
    problem = _hub_problem(model if named is None else named[0])
    if problem is None:
        yield warning(
            "model", f"{model} is on the hub, not here", "it is downloaded at first start"
        )
    else:
        yield fail("model", f"{model}: {problem}", "check the id, your network and HF_TOKEN")


def _cached(model: str) -> Path | None:
    """The folder, or the named GGUF file, in the cache of huggingface-hub; None if it is not
    there."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None  # the check of the packages reports it
    try:
        named = hub_file(model)
        found = try_to_load_from_cache(*(named or (model, "config.json")))
    except HFValidationError:
        return None
    if not isinstance(found, str):
        return None
    return Path(found) if named is not None else Path(found).parent


def _hub_problem(model: str) -> str | None:
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    except ImportError:
        return "huggingface-hub is not installed"
    unreachable = transport_errors()
    try:
        HfApi().model_info(model, timeout=_HUB_SECONDS)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled) as error:
        return str(error).splitlines()[0]
    except unreachable as error:
        return f"the hub cannot be reached ({type(error).__name__})"
    return None
