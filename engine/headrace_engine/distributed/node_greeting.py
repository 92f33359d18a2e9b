"""What a node tells node 0 when it joins, and what must be equal on all nodes."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from typing import Any

from ..checkpoints.checkpoint import load_checkpoint
from ..checkpoints.fingerprint import sampled_digest
from ..core.config import EngineConfig
from ..core.errors import CheckpointError
from ..core.speculative_config import SpeculativeConfig
from .handshake import HandshakeFailed

# Settings of rank 0 alone: scheduling, drafts without a head, the files of adapters, and how nodes
# meet.
_OF_RANK_ZERO = (
    *("speculative_config", "policy", "policy_options", "lora_modules"),
    *("node_rank", "master_addr", "master_port", "node_secret_file", "node_timeout"),
)
# Settings of which each node has its own.
_OF_NODE = ("model", "revision", "device", "threads", "tuned_config_folder")


def rank_settings(config: EngineConfig) -> dict[str, Any]:
    """The settings that ranks get from rank 0."""
    names = (field.name for field in fields(config))
    found = {name: getattr(config, name) for name in names if name not in _OF_RANK_ZERO}
    if config.draft_head is not None:  # ranks share it
        found["speculative_config"] = asdict(config.draft_head)
    return found


def read_settings(settings: Mapping[str, Any]) -> EngineConfig:
    """The configuration of a rank that got these settings."""
    head = settings.get("speculative_config")
    speculation = None if head is None else SpeculativeConfig(**head)
    return EngineConfig(**{**settings, "speculative_config": speculation})


@dataclass(frozen=True, slots=True)
class NodeGreeting:
    """A node: its number, the address at which its ranks are reached, its own values of settings
    that may differ (`own`), and all that must not differ (`shared`)."""

    node: int
    address: str
    own: Mapping[str, Any]
    shared: Mapping[str, Any]

    @classmethod
    def of(cls, config: EngineConfig, device: str, address: str) -> "NodeGreeting":
        """The greeting of this node; `device` is a device type. Raises CheckpointError."""
        settings = json.loads(json.dumps(rank_settings(config), default=dict))
        own = {name: settings.pop(name) for name in _OF_NODE}
        checkpoint = load_checkpoint(config.model, config.revision)
        try:
            sketch = sampled_digest(checkpoint.folder)
        except OSError as error:
            raise CheckpointError(f"{checkpoint.folder}: {error}") from error
        release = {"version": version("headrace"), "device": device, "model": sketch}
        return cls(config.node_rank, address, own, {**release, **settings})

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> "NodeGreeting":
        """Reads the greeting of another node. Raises HandshakeFailed."""
        node, address = content.get("node"), content.get("address")
        own, shared = content.get("own"), content.get("shared")
        if (
            type(node) is not int
            or not isinstance(address, str)
            or not isinstance(own, dict)
            or set(own) != set(_OF_NODE)
            or not isinstance(shared, dict)
        ):
            raise HandshakeFailed("its greeting is not that of a node")
        return cls(node, address, own, shared)

    def difference(self, other: "NodeGreeting") -> str | None:
        """The first thing that must be equal and is not, in words; None if all is equal."""
        for name in sorted(self.shared.keys() | other.shared.keys()):
            mine, others = self.shared.get(name), other.shared.get(name)
            if mine == others:
                continue
            if name == "model":
                return f"node {self.node} and node {other.node} have different checkpoints"
            return (
                f"{name} is {mine!r:.80} on node {self.node} and {others!r:.80} on node "
                f"{other.node}"
            )
        return None
