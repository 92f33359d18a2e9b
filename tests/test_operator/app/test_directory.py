"""The operator's messages reach a real engine's queue through a real server."""

from pathlib import Path

from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.wire.messages import Drain
from headrace_operator.cluster.drain import QueueEngineControl
from headrace_testing.operators import engine_status
from headrace_testing.valkey import ValkeyServer
from headrace_testing.waiting import first


async def test_an_engine_is_found_and_gets_drain(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path, appendonly=False)
    server.start()
    connection = Connection(ConnectionConfig(url=server.url))
    status = engine_status("qwen-engine-5c-x", running=3)
    engine = RedisEngineQueue(connection, status.engine_id, "qwen")
    directory = QueueEngineControl(connection)
    try:
        await engine.start()
        await engine.beat((), status)
        assert await directory.engines("qwen") == [status]
        assert await directory.engines("other") == []
        await directory.drain(status.engine_id, status.model)
        assert await first(engine.controls(), 1) == [Drain()]
    finally:
        await engine.close()
        await connection.close()
        server.stop()
