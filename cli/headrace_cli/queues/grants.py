"""`headrace redis grant|revoke`: the models that engines with their own Redis user may register."""

from headrace_common.protocol.redis.client.connection import Connection
from headrace_common.protocol.redis.registry import RedisModelRegistry
from headrace_common.protocol.registry import RegistrationGrant, RegistryError

from ..errors import UsageError
from .queues import QueueSession


def grant(session: QueueSession, model: str, permission: RegistrationGrant) -> None:
    """Allows engines with their own Redis user to register a model. Raises CliError."""

    async def write(connection: Connection) -> None:
        await RedisModelRegistry(connection).grant(model, permission)

    try:
        session.connect(write)
    except RegistryError as error:
        raise UsageError(f"model {model!r} cannot be granted", str(error)) from error
    message = f"engines with the Redis user of {model} may register it"
    session.output.notes.print(message, markup=False)


def revoke(session: QueueSession, model: str, owner: str) -> None:
    """Removes a model's grant and registration. Raises CliError."""

    async def remove(connection: Connection) -> bool:
        return await RedisModelRegistry(connection).remove(model, owner)

    if not session.connect(remove):
        raise UsageError(
            f"{model!r} is not registered for owner {owner!r}", "name its owner with --owner"
        )
    session.output.notes.print(f"{model} was removed", markup=False)
