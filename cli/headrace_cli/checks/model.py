"""The model's folder, or its hub id: whether an engine could load it. Reads no weights."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace_common.checkpoint import local_source

from ..errors import UsageError
from .finding import Finding, Level, fail, ok, warning

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_SECONDS = 5.0


def check(model: str) -> Iterator[Finding]:
    folder = _folder(model)
    if folder is not None:
        yield from _check_folder(folder)
    elif _HUB_ID.fullmatch(model):
        yield from _check_hub(model)
    else:
        yield fail(
            "model",
            f"{model} is neither a folder nor a hub id",
            "give the folder with config.json and *.safetensors, or an id such as Qwen/Qwen3-0.6B",
        )


def refuse_unusable(model: str) -> None:
    """Raises UsageError where it is plain without the network that no engine can load it."""
    if _folder(model) is None and _HUB_ID.fullmatch(model):
        return
    for finding in check(model):
        if finding.level is Level.FAIL:
            raise UsageError(finding.detail, finding.remedy)


def weight_bytes(model: str) -> int | None:
    """Size of the safetensors files; None where they are not on this machine."""
    folder = _folder(model) or (_cached(model) if _HUB_ID.fullmatch(model) else None)
    if folder is None:
        return None
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None


def _folder(model: str) -> Path | None:
    path = Path(local_source(model))
    return path if path.is_dir() else None


def _check_folder(folder: Path) -> Iterator[Finding]:
    try:
        config: Any = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        yield fail("model", f"{folder} has no config.json", "give the folder of a HF checkpoint")
        return
    except (OSError, ValueError) as error:
        yield fail("model", f"{folder / 'config.json'}: {error}", "download the checkpoint again")
        return
    lacking = _lacking(folder)
    if lacking:
        yield fail("model", f"{folder} has {lacking}", "download the checkpoint again, whole")
        return
    architecture = ", ".join(config.get("architectures") or ["unknown architecture"])
    size = (weight_bytes(str(folder)) or 0) / 2**20
    yield ok("model", f"{folder}: {architecture}, {size:.0f} MiB")


def _lacking(folder: Path) -> str:
    index = folder / "model.safetensors.index.json"
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("pytorch_model*.bin"))
        return "only pickled weights (*.bin), which are refused" if pickled else "no *.safetensors"
    if index.exists():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            return f"an unreadable {index.name}"
        if absent := sorted(name for name in shards if not (folder / name).is_file()):
            return f"no {absent[0]}, which {index.name} names"
    return "" if (folder / "tokenizer.json").exists() else "no tokenizer.json"


def _check_hub(model: str) -> Iterator[Finding]:
    """A hub id is fine where its files are cached or the hub answers for it."""
    if cached := _cached(model):
        yield from _check_folder(cached)
        return
    problem = _hub_problem(model)
    if problem is None:
        yield warning(
            "model", f"{model} is on the hub, not here", "it is downloaded at first start"
        )
    else:
        yield fail("model", f"{model}: {problem}", "check the id, your network and HF_TOKEN")


def _cached(model: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None  # told by the check of the packages
    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _hub_problem(model: str) -> str | None:
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    except ImportError:
        return "huggingface-hub is not installed"
    import httpx

    try:
        HfApi().model_info(model, timeout=_HUB_SECONDS)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled) as error:
        return str(error).splitlines()[0]
    except (httpx.HTTPError, OSError) as error:
        return f"the hub cannot be reached ({type(error).__name__})"
    return None
