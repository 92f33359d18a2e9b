"""A Valkey with a user for each role and for the engines of two models, beside its unrestricted
default user."""

from pathlib import Path
from urllib.parse import quote

from headrace_common.protocol.redis.client.connection import Connection
from headrace_common.protocol.redis.users import ROLES as ROLES
from headrace_common.protocol.redis.users import model_line, model_user, role_line
from headrace_common.sealing.keyring import Keyring
from headrace_testing.backends import MODEL, OverRedis
from headrace_testing.valkey import ValkeyServer

ACL = Path(__file__).parents[3] / "charts/headrace/files/acl"
OTHER = "org/model-2"
PASSWORD = "secret"
FILES = {"config.json": b"{}"}


def server_with_users(folder: Path) -> ValkeyServer:
    """A server that is not started yet. All users have the same PASSWORD."""
    folder.mkdir(parents=True, exist_ok=True)
    users = [*map(role_line, ROLES), *map(model_line, (MODEL, OTHER))]
    lines = ["user default on nopass ~* &* +@all", *(f"{user} >{PASSWORD}" for user in users)]
    path = folder / "users.acl"
    path.write_text("\n".join(lines) + "\n")
    return ValkeyServer(folder, "--aclfile", str(path), appendonly=False)


def url_as(server: ValkeyServer, role: str) -> str:
    """The URL for a role, or for the engines of a model."""
    name = f"headrace-{role}" if role in ROLES else model_user(role)
    return server.url.replace("redis://", f"redis://{quote(name, safe='')}:{PASSWORD}@")


class OverUsers(OverRedis):
    """A Backend whose queues connect as the users of their roles, or of their model."""

    def __init__(
        self, server: ValkeyServer, *, engine: str = "engine", ring: Keyring | None = None
    ) -> None:
        super().__init__(server.url, ring=ring)
        self._server = server
        self._engine = engine

    def connect(self, _role: str = "") -> Connection:
        role = self._engine if _role == "engine" else _role
        return self._connect(url_as(self._server, role) if role else self.config.url)
