"""The engine process: reads its settings, loads the model, serves until SIGTERM."""

import os

# libgomp reads it when torch loads it. By default its threads spin for milliseconds at every
# barrier, which takes cores from a gateway and Redis on the same machine.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

if __name__ == "__main__":
    from headrace_common.termination import exit_on_signal

    exit_on_signal()  # before torch, which takes seconds

import asyncio
import gc
import logging
import signal
import socket
import sys
from importlib.metadata import version
from pathlib import Path

from headrace_common.config.process import (
    EXIT_CONFIG,
    EXIT_FAILED,
    read_settings,
    write_termination_message,
)
from headrace_common.errors import HeadraceError
from headrace_common.observability import telemetry
from headrace_common.observability.clock_offset import show_clock_offset
from headrace_common.protocol.redis.adapters import RedisAdapterSets
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.protocol.redis.live import RedisSnapshotWriter
from headrace_common.protocol.redis.registry import RedisModelRegistry
from headrace_common.protocol.redis.sharded_engine import ShardedEngineQueue
from headrace_common.sealing.keyring_file import KeyringFile
from headrace_common.text.checkpoint import CheckpointFiles
from headrace_common.text.errors import TokenizerError
from headrace_common.text.tokenizer import Tokenizer
from headrace_common.wire import keys

from .core.config import EngineConfig
from .core.errors import EngineError, RequestError
from .engine.engine import Engine
from .lora.adapter import fetch_adapter
from .model_runner.model_runner import ModelRunner
from .scheduler.policies import make_policy
from .serving.adapter_loading import AdapterLoading
from .serving.model_registration import ModelFiles, ModelRegistration, ModelSource
from .serving.settings import EngineSettings
from .serving.worker import Worker, WorkerConfig
from .structured_output.compiler import GrammarCompiler

logger = logging.getLogger("headrace_engine")

# The most seconds for which a drained engine writes KV that others may use.
CLOSE_SECONDS = 5.0
# Codes of errors that a restart may fix.
FAILURES = ("worker_failed", "rank_failed")


def main(arguments: list[str] | None = None) -> int:
    """Runs the engine process and returns its exit code."""
    settings = read_settings(EngineSettings, "headrace engine", arguments)
    if settings is None:
        return EXIT_CONFIG
    try:
        # Before the weights, which may take minutes to load.
        sealing = KeyringFile(settings)
        model = _source(settings).read() if settings.register_model else None
        runner, engine, grammars = _load(settings, model)
        files = None if model is None else model.files
        asyncio.run(serve(settings, engine, sealing, grammars, runner, files))
        engine.close(CLOSE_SECONDS)
        if runner.peers is not None:  # after a failure, they end with this process
            runner.peers.close()
    except (HeadraceError, EngineError) as error:
        logger.error(
            "engine cannot serve",
            extra={"code": error.code, "error": str(error)},
            exc_info=error.__cause__,
        )
        write_termination_message(error.code, str(error))
        return EXIT_FAILED if error.code in FAILURES else EXIT_CONFIG
    return 0


def _load(
    settings: EngineSettings, model: ModelFiles | None = None
) -> tuple[ModelRunner, Engine, GrammarCompiler | None]:
    config = settings.engine_config()
    # before the weights, for the same reason
    policy = make_policy(config.policy, config.policy_options)
    runner = ModelRunner(config)
    runner.warm_up()
    grammars = _grammars(config, runner, None if model is None else model.tokenizer)
    # Objects that exist now stay alive, so the collector need not visit them between steps.
    gc.collect()
    gc.freeze()
    return runner, Engine(config, runner, policy), grammars


def _grammars(
    config: EngineConfig, runner: ModelRunner, tokenizer: Tokenizer | None
) -> GrammarCompiler | None:
    """Makes the compiler before the first request, since that blocks the process."""
    if runner.pooler_config is not None:
        return None
    try:
        tokenizer = tokenizer or Tokenizer.load(config.model, config.revision)
        return GrammarCompiler(tokenizer, runner.vocab_size, runner.eos_token_ids)
    except (TokenizerError, RequestError) as error:
        logger.warning(
            "no structured outputs: there is no compiler for grammars", extra={"error": str(error)}
        )
        return None


async def serve(
    settings: EngineSettings,
    engine: Engine,
    sealing: KeyringFile,
    grammars: GrammarCompiler | None = None,
    runner: ModelRunner | None = None,
    files: CheckpointFiles | None = None,
) -> None:
    """Serves until SIGTERM or a drain message. Raises the error that ended the service."""
    engine_id = keys.new_incarnation(f"{socket.gethostname()}.{os.getpid()}")
    config = ConnectionConfig(url=settings.redis_url, credentials=settings.redis_credentials)
    connection = Connection(config, sealing.sealer)
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

    def live() -> str | None:
        return sealing.failed or (None if worker is None else worker.stuck())

    measures = telemetry.setup(
        "headrace-engine",
        version=version("headrace"),
        instance_id=engine_id,
        metrics_host=settings.metrics_host,
        metrics_port=settings.metrics_port,
        metrics_fd=settings.metrics_fd,
        live=live,
        ready=lambda: "starting" if worker is None else worker.not_ready(),
    )
    show_clock_offset(measures, connection.clock)
    try:
        sealing.start()
        reader = None if runner is None else runner.image_reader
        registration = _registration(settings, engine, connection, files, images=reader is not None)
        worker = Worker(
            _worker_config(settings, engine, 0.0 if runner is None else runner.kv_bytes_per_token),
            queue,
            engine,
            measures,
            registration,
            grammars,
            RedisSnapshotWriter(connection, engine_id, settings.name),
            _adapters(settings, runner, connection),
            reader,
        )
        if runner is not None and runner.peers is not None:
            runner.peers.watch(worker.fail)
        running_loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            running_loop.add_signal_handler(number, worker.end)
        await worker.run()
    finally:
        await sealing.close()
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
    *,
    images: bool,
) -> ModelRegistration | None:
    if not settings.register_model:
        return None
    return ModelRegistration(
        RedisModelRegistry(connection),
        _source(settings),
        name=settings.name,
        max_model_len=engine.max_model_len,
        owner=settings.owner,
        files=files,
        adapters=tuple(settings.lora_modules),
        holds=settings.hold_waiting,
        images=images,
        clock=connection.clock.now,
    )


def _adapters(
    settings: EngineSettings, runner: ModelRunner | None, connection: Connection
) -> AdapterLoading | None:
    """What loads adapters while the engine serves; None if that is off."""
    if settings.lora_dir is None or runner is None:
        return None
    sets = RedisAdapterSets(connection, int(settings.lease * 1000))
    return AdapterLoading(
        sets,
        runner,
        settings.name,
        Path(settings.lora_dir),
        fetch=fetch_adapter if settings.lora_hub else None,
    )


def _worker_config(
    settings: EngineSettings, engine: Engine, kv_bytes_per_token: float
) -> WorkerConfig:
    return WorkerConfig(
        model=settings.name,
        name=settings.display_name,
        max_model_len=engine.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        block_size=settings.block_size,
        kv_bytes_per_token=kv_bytes_per_token,
        lookahead=settings.taken_ahead,
        version=version("headrace"),
        beat_interval=settings.beat_interval,
        drain_timeout=settings.drain_timeout,
        stays_when_drained=settings.after_drain == "wait",
        step_timeout=settings.step_timeout,
        debug_pages=settings.debug_pages,
        grammar_bounds=settings.grammar_bounds,
    )


def _exit(code: int) -> None:
    """Ends the process at once: a step that hangs on its device would keep it alive."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit(main())
