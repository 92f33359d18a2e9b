"""`headrace redis grant|revoke`: the models that engines with their own Redis user may register."""

from headrace_common.protocol.redis.client.connection import Connection
from headrace_common.protocol.redis.registry import RedisModelRegistry
from headrace_common.protocol.registry import RegistrationGrant, RegistryError

from ..errors import UsageError
from .queues import QueueSession


def give(session: QueueSession, model: str, grant: RegistrationGrant) -> None:
    """Raises CliError."""

    async def write(connection: Connection) -> None:
        await RedisModelRegistry(connection).grant(model, grant)

    try:
        session.connect(write)
    except RegistryError as error:
        raise UsageError(f"model {model!r} cannot be granted", str(error)) from error
    session.output.notes.print(f"engines with its user may register {model}", markup=False)


def take(session: QueueSession, model: str, owner: str) -> None:
    """Raises CliError."""

    async def remove(connection: Connection) -> bool:
        return await RedisModelRegistry(connection).remove(model, owner)

    if not session.connect(remove):
        raise UsageError(
            f"{model!r} is not registered for owner {owner!r}", "name its owner with --owner"
        )
    session.output.notes.print(f"{model} was removed", markup=False)
