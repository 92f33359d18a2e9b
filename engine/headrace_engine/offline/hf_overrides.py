"""A checkpoint with some fields of its config.json replaced: vLLM's `hf_overrides`."""

import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_OLD_ROPE = ("rope_scaling", "rope_theta")


class OverriddenCheckpoint:
    """A temporary folder with links to a checkpoint's files and a new config.json.

    The folder exists as long as this object.
    """

    def __init__(
        self, folder: Path, config: Mapping[str, Any], overrides: Mapping[str, Any]
    ) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="headrace-overrides-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        for file in folder.iterdir():
            if file.name != "config.json":
                (self.path / file.name).symlink_to(file.resolve())
        (self.path / "config.json").write_text(json.dumps(_merged(config, overrides)))


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the overrides. Overrides by RoPE's old names change fields of
    `rope_parameters`."""
    merged = {**config, **overrides}
    old = {name: overrides[name] for name in _OLD_ROPE if name in overrides}
    if not old or "rope_parameters" not in config or "rope_parameters" in overrides:
        return merged
    parameters = {**config["rope_parameters"], **(old.pop("rope_scaling", None) or {}), **old}
    kept = {name: value for name, value in merged.items() if name not in _OLD_ROPE}
    return {**kept, "rope_parameters": parameters}
