"""The engine process: reads its settings, loads the model, serves until SIGTERM."""

import os

# libgomp reads it when torch loads it. Its default spins for milliseconds at every barrier, which
# takes the cores from the gateway and Redis where they share them with the engine.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import asyncio
import gc
import logging
import signal
import socket
import sys
from importlib.metadata import version

from headrace_common import keys, telemetry
from headrace_common.checkpoint import CheckpointFiles, TokenizerError
from headrace_common.clock_offset import show_clock_offset
from headrace_common.errors import HeadraceError
from headrace_common.process import EXIT_CONFIG, EXIT_FAILED, read_settings
from headrace_common.protocol.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis_engine import RedisEngineQueue
from headrace_common.protocol.redis_registry import RedisModelRegistry
from headrace_common.protocol.sharded_engine import ShardedEngineQueue
from headrace_common.tokenizer import Tokenizer

from .config import EngineConfig
from .engine import Engine
from .errors import EngineError, RequestError
from .grammar.compiler import GrammarCompiler
from .placement import PeerRanks
from .policies import make_policy
from .registration import ModelFiles, ModelSource, Registration
from .runner import ModelRunner
from .settings import EngineSettings
from .worker import Worker, WorkerConfig

logger = logging.getLogger("headrace_engine")

# Codes of errors that a new start may mend.
FAILURES = ("worker_failed", "rank_failed")


def main(arguments: list[str] | None = None) -> int:
    """Returns the process's exit code."""
    settings = read_settings(EngineSettings, "headrace engine", arguments)
    if settings is None:
        return EXIT_CONFIG
    try:
        # Before the weights, which may take minutes.
        model = _source(settings).read() if settings.register_model else None
        runner, engine, grammars = _load(settings, model)
        files = None if model is None else model.files
        asyncio.run(serve(settings, engine, grammars, runner.peers, files))
        if runner.peers is not None:  # where serving failed they end with this process
            runner.peers.close()
    except (HeadraceError, EngineError) as error:
        logger.error(
            "engine cannot serve",
            extra={"code": error.code, "error": str(error)},
            exc_info=error.__cause__,
        )
        return EXIT_FAILED if error.code in FAILURES else EXIT_CONFIG
    return 0


def _load(
    settings: EngineSettings, model: ModelFiles | None = None
) -> tuple[ModelRunner, Engine, GrammarCompiler | None]:
    config = settings.engine_config()
    policy = make_policy(config.policy, config.policy_options)  # before the weights, as above
    runner = ModelRunner(config)
    runner.warm_up()
    grammars = _grammars(config, runner, None if model is None else model.tokenizer)
    # What is alive now stays: the collector need not look at it again between steps.
    gc.collect()
    gc.freeze()
    return runner, Engine(config, runner, policy), grammars


def _grammars(
    config: EngineConfig, runner: ModelRunner, tokenizer: Tokenizer | None
) -> GrammarCompiler | None:
    """Made before the first request, as it holds up everything else in the process."""
    if runner.pooler_config is not None:
        return None
    try:
        tokenizer = tokenizer or Tokenizer.load(config.model, config.revision)
        return GrammarCompiler(tokenizer, runner.vocab_size, runner.eos_token_ids)
    except (TokenizerError, RequestError) as error:
        logger.warning("no structured outputs", extra={"error": str(error)})
        return None


async def serve(
    settings: EngineSettings,
    engine: Engine,
    grammars: GrammarCompiler | None = None,
    peers: PeerRanks | None = None,
    files: CheckpointFiles | None = None,
) -> None:
    """Serves until SIGTERM or a drain message. Raises what breaks the service."""
    engine_id = keys.new_incarnation(f"{socket.gethostname()}.{os.getpid()}")
    connection = Connection(ConnectionConfig(url=settings.redis_url))
    queue = ShardedEngineQueue(
        lambda shard: RedisEngineQueue(
            connection,
            engine_id,
            settings.name,
            shard=shard,
            lease_ms=int(settings.lease * 1000),
        ),
        settings.queue_shards,
    )
    worker: Worker | None = None
    measures = telemetry.setup(
        "headrace-engine",
        version=version("headrace"),
        instance_id=engine_id,
        metrics_host=settings.metrics_host,
        metrics_port=settings.metrics_port,
        metrics_fd=settings.metrics_fd,
        live=lambda: None if worker is None else worker.stuck(),
        ready=lambda: "starting" if worker is None else worker.not_ready(),
    )
    show_clock_offset(measures, connection.clock)
    try:
        registration = _registration(settings, engine, connection, files)
        worker = Worker(
            _worker_config(settings, engine), queue, engine, measures, registration, grammars
        )
        if peers is not None:
            peers.watch(worker.fail)
        running_loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            running_loop.add_signal_handler(number, worker.drain)
        await worker.run()
    finally:
        await queue.close()
        await connection.close()
        await asyncio.to_thread(measures.shutdown)


def _source(settings: EngineSettings) -> ModelSource:
    return ModelSource(
        model=settings.model, revision=settings.revision, chat_template=settings.chat_template
    )


def _registration(
    settings: EngineSettings,
    engine: Engine,
    connection: Connection,
    files: CheckpointFiles | None,
) -> Registration | None:
    if not settings.register_model:
        return None
    return Registration(
        RedisModelRegistry(connection),
        _source(settings),
        name=settings.name,
        max_model_len=engine.max_model_len,
        owner=settings.owner,
        files=files,
        adapters=tuple(settings.lora_modules),
        clock=connection.clock.now,
    )


def _worker_config(settings: EngineSettings, engine: Engine) -> WorkerConfig:
    return WorkerConfig(
        model=settings.name,
        max_model_len=engine.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        block_size=settings.block_size,
        lookahead=settings.taken_ahead,
        version=version("headrace"),
        beat_interval=settings.beat_interval,
        drain_timeout=settings.drain_timeout,
        step_timeout=settings.step_timeout,
        debug_pages=settings.debug_pages,
        grammar_bounds=settings.grammar_bounds,
    )


def _exit(code: int) -> None:
    """Ends the process at once: a step that hangs on its device would keep it for ever."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit(main())
