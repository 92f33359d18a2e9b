"""The processes under attack: Valkey, a gateway and two engines, under the limits of a pod."""

import json
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_common.text.checkpoint import DEMO_MODEL
from headrace_testing.api_keys import KeyBook
from headrace_testing.image_prompts import save_chat_model
from headrace_testing.processes import Running, start_program
from headrace_testing.stack import Stack
from headrace_testing.tool_templates import CHATML_WITH_TOOLS
from headrace_testing.valkey import ValkeyServer, free_port

from .limits import DESCRIPTORS, ENGINE_BYTES, GATEWAY_BYTES, PATIENCE_S, REDIS_BYTES, REDIS_MEMORY

EMBEDDER = "embedder"
# A model that reads images.
VISION = "vision"
# Forms of addresses that lead to this machine; the settings allow all of them as hosts of images.
INNER_HOSTS = (
    *("localhost", "127.0.0.1", "127.1", "0x7f.1", "0177.0.0.1", "2130706433", "0.0.0.0"),
    *("::1", "::ffff:127.0.0.1", "::ffff:7f00:1", "64:ff9b::7f00:1", "2002:7f00:1::"),
)
# A model whose chat template runs for as many loops as a chat's `loops` says.
LOOPING = "looping"
LOOPING_TEMPLATE = """\
{% for _ in range(loops | default(1)) %}{% for _ in range(1000) %}{% endfor %}{% endfor %}
{{- messages[-1].content }}"""
ATTACKER, BYSTANDER = "attacker", "bystander"


@dataclass(frozen=True, slots=True)
class Target:
    """The addresses of the processes under attack, and the API keys of both tenants."""

    api: int
    gateway_metrics: int
    engine_metrics: int
    attacker: str
    bystander: str
    inner: int  # a port of a server that no client may reach


@dataclass(frozen=True, slots=True)
class Watched:
    """A process with its children, and the memory that they may use together."""

    name: str
    pid: int
    limit: int


class HostileStack(Stack):
    """One gateway with API keys, and engines that generate, embed, read images, and register
    LOOPING."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._keys = KeyBook(folder / "keys.yaml")
        for name in (ATTACKER, BYSTANDER):
            self._keys.add(name, tenant=name)
        (folder / "template.jinja").write_text(CHATML_WITH_TOOLS)
        options = ("--maxmemory", REDIS_MEMORY, "--maxmemory-policy", "noeviction")
        self._valkey = ValkeyServer(folder / "valkey", *options)
        # Long leases: none may expire while other programs load the machine.
        super().__init__(Path(DEMO_MODEL), folder, servers=self._valkey, start=start_limited)
        self.engine = self.add_engine("--lease", "10")
        self.embedder = self.add_engine(
            *("--lease", "10", "--served-model-name", EMBEDDER, "--task", "embed")
        )
        looping = folder / "looping.jinja"
        looping.write_text(LOOPING_TEMPLATE)
        self.looping = self.add_engine(
            *("--lease", "10", "--served-model-name", LOOPING, "--chat-template", str(looping))
        )
        self.vision = self.add_engine(
            *("--lease", "10", "--served-model-name", VISION),
            *("--model", str(save_chat_model(folder / "vision", "qwen3-vl"))),
        )
        self._inner = free_port()
        domains = [f"{host}:{self._inner}" for host in INNER_HOSTS]
        self.gateway = self.add_gateway(
            *("--allowed-media-domains", json.dumps(domains)),
            *("--api-keys-file", str(self._keys.path)),
            *("--chat-template", str(folder / "template.jinja")),
            *("--header-timeout", str(PATIENCE_S), "--body-timeout", str(PATIENCE_S)),
            *("--write-timeout", str(PATIENCE_S)),
        )

    def until_ready(self) -> None:
        self.await_engines(1)
        for engine in (self.embedder, self.looping, self.vision):
            engine.await_log("engine ready")

    @property
    def target(self) -> Target:
        secrets = self._keys.secrets
        return Target(
            self.gateway.port,
            self.gateway.metrics_port,
            self.engine.metrics_port,
            secrets[ATTACKER],
            secrets[BYSTANDER],
            self._inner,
        )

    @property
    def watched(self) -> tuple[Watched, ...]:
        return (
            Watched("gateway", self.gateway.pid, GATEWAY_BYTES),
            Watched("engine", self.engine.pid, ENGINE_BYTES),
            Watched("embedder", self.embedder.pid, ENGINE_BYTES),
            Watched("looping", self.looping.pid, ENGINE_BYTES),
            Watched("vision", self.vision.pid, ENGINE_BYTES),
            Watched("redis", self._valkey.pid, REDIS_BYTES),
        )

    @property
    def dead(self) -> list[str]:
        """The processes that have ended."""
        return [each.name for each in (self.gateway, *self.engines) if not each.alive]


def start_limited(
    module: str, arguments: Sequence[str], log: Path, env: Mapping[str, str]
) -> Running:
    """A Starter of processes that may open DESCRIPTORS files. `watched` limits their memory."""
    running = start_program(module, arguments, log, env)
    resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    return running
