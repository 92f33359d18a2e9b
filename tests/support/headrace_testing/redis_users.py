"""A Valkey with the chart's users, one for each role, beside its unrestricted default user."""

from pathlib import Path

from headrace_common.protocol.connection import Connection
from headrace_testing.backends import OverRedis
from headrace_testing.valkey import ValkeyServer

ACL = Path(__file__).parents[3] / "charts/headrace/files/acl"
ROLES = ("gateway", "engine", "operator")


def server_with_users(folder: Path) -> ValkeyServer:
    """Not started yet. Each user's password is the name of its role."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["user default on nopass ~* &* +@all"]
    for role in ROLES:
        lines.append(f"{(ACL / f'{role}.acl').read_text().strip()} >{role}")
    path = folder / "users.acl"
    path.write_text("\n".join(lines) + "\n")
    return ValkeyServer(folder, "--aclfile", str(path), appendonly=False)


def url_as(server: ValkeyServer, role: str) -> str:
    return server.url.replace("redis://", f"redis://headrace-{role}:{role}@")


class OverUsers(OverRedis):
    """A Backend whose queues connect as the users of their roles."""

    def __init__(self, server: ValkeyServer) -> None:
        super().__init__(server.url)
        self._server = server

    def connect(self, _role: str = "") -> Connection:
        return self._connect(url_as(self._server, _role) if _role else self.config.url)
