"""The engine process: reads its settings, loads the model, serves until SIGTERM."""

import gc
import os

if __name__ == "__main__":
    from headrace_common.termination import exit_on_signal
    from headrace_engine.core.start_phases import StartPhases, process_age

    exit_on_signal()  # before torch, which takes seconds
    started = StartPhases(process_age())
    started.begin("imports")
    # Modules stay: collecting garbage between them takes a tenth of the imports' time.
    gc.disable()

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

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
from headrace_common.protocol.redis.kv_events import RedisKVEventWriter
from headrace_common.protocol.redis.live import RedisSnapshotWriter
from headrace_common.protocol.redis.registry import RedisModelRegistry
from headrace_common.protocol.redis.sharded_engine import ShardedEngineQueue
from headrace_common.protocol.redis.slots import RedisSlot
from headrace_common.protocol.variants import EngineSide
from headrace_common.sealing.keyring_file import KeyringFile
from headrace_common.text.checkpoint import CheckpointFiles, local_source
from headrace_common.text.errors import TokenizerError
from headrace_common.text.tokenizer import Tokenizer
from headrace_common.wire import keys

from .checkpoints.checkpoint import load_checkpoint
from .checkpoints.fingerprint import sampled_digest
from .core.config import EngineConfig
from .core.errors import EngineError, RequestError
from .core.start_phases import StartPhases, ignore_phase
from .engine.engine import Engine
from .lora.adapter import fetch_adapter
from .lora.object_storage import fetched
from .model_runner.model_runner import ModelRunner
from .scheduler.policies import make_policy
from .serving.adapter_loading import AdapterLoading
from .serving.model_registration import ModelFiles, ModelRegistration, ModelSource
from .serving.rank_node_process import run_rank_node
from .serving.settings import EngineSettings
from .serving.start_notice import announced_start
from .serving.turn_taking import TurnTaking, load_in_turn
from .serving.worker import Worker, WorkerConfig
from .structured_output.compiler import GrammarCompiler

logger = logging.getLogger("headrace_engine")
T = TypeVar("T")

# The most seconds for which a drained engine writes KV that others may use.
CLOSE_SECONDS = 5.0
# Codes of errors that a restart may fix.
FAILURES = ("worker_failed", "rank_failed")


def main(arguments: list[str] | None = None, phases: StartPhases | None = None) -> int:
    """Runs the engine process and returns its exit code. `phases` began with the process."""
    phases = phases or StartPhases()
    phases.begin("settings")
    settings = read_settings(EngineSettings, "headrace engine", arguments)
    if settings is None:
        return EXIT_CONFIG
    try:
        if settings.node_rank:
            run_rank_node(settings, phases)
            return 0
        # Before the weights, which may take minutes to load.
        sealing = KeyringFile(settings)
        phases.begin("tokenizer")
        model = _source(settings).read() if settings.register_model else None
        engine_id = keys.new_incarnation(f"{socket.gethostname()}.{os.getpid()}")
        load = partial(_load, settings, model, phases)
        name = settings.display_name
        with announced_start(_redis(settings), settings.name, engine_id, name, phases):
            if settings.sharing_group is None:
                runner, engine, grammars = load()
            else:
                phases.begin("turn")
                runner, engine, grammars = asyncio.run(_load_in_turn(settings, engine_id, load))
        files = None if model is None else model.files
        asyncio.run(serve(settings, engine_id, phases, engine, sealing, grammars, runner, files))
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


async def _load_in_turn(settings: EngineSettings, engine_id: str, load: Callable[[], T]) -> T:
    """Loads the model once the accelerator is free."""
    connection = _connection(settings)
    slot = _slot(settings, connection, engine_id)
    assert slot is not None, "the engine shares its accelerator"
    try:
        return await load_in_turn(slot, settings.sharing, load)
    finally:
        await connection.close()


def _connection(settings: EngineSettings, sealing: KeyringFile | None = None) -> Connection:
    config = _redis(settings)
    return Connection(config) if sealing is None else Connection(config, sealing.sealer)


def _slot(settings: EngineSettings, connection: Connection, engine_id: str) -> RedisSlot | None:
    """The slot of the accelerator; None if the engine does not share it."""
    if settings.sharing_group is None:
        return None
    return RedisSlot(
        connection,
        settings.sharing_group,
        engine_id,
        settings.name,
        shards=settings.queue_shards,
        lease_ms=int(settings.lease * 1000),
    )


def _load(
    settings: EngineSettings, model: ModelFiles | None = None, phases: StartPhases | None = None
) -> tuple[ModelRunner, Engine, GrammarCompiler | None]:
    begin = ignore_phase if phases is None else phases.begin
    config = settings.engine_config()
    # before the weights, for the same reason
    policy = make_policy(config.policy, config.policy_options)
    runner = ModelRunner(config, on_phase=begin)
    runner.warm_up()
    begin("grammars")
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
    engine_id: str,
    phases: StartPhases,
    engine: Engine,
    sealing: KeyringFile,
    grammars: GrammarCompiler | None = None,
    runner: ModelRunner | None = None,
    files: CheckpointFiles | None = None,
) -> None:
    """Serves until SIGTERM or a drain message. Raises the error that ended the service."""
    phases.begin("telemetry")
    connection = _connection(settings, sealing)
    side = EngineSide(settings.side, await asyncio.to_thread(_weights, settings))
    queue = ShardedEngineQueue(
        lambda shard: RedisEngineQueue(
            connection,
            engine_id,
            settings.name,
            shard=shard,
            lease_ms=int(settings.lease * 1000),
            side=side,
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
            _turns(settings, connection, engine_id),
            phases,
            reader,
            RedisKVEventWriter(connection, engine_id, settings.name),
        )
        running_loop = asyncio.get_running_loop()
        if runner is not None and runner.peers is not None:
            runner.peers.watch(worker.fail)
            runner.peers.on_drain(partial(running_loop.call_soon_threadsafe, worker.end))
        for number in (signal.SIGTERM, signal.SIGINT):
            running_loop.add_signal_handler(number, worker.end)
        await worker.run()
    finally:
        await sealing.close()
        await queue.close()
        await connection.close()
        await asyncio.to_thread(measures.shutdown)


def _weights(settings: EngineSettings) -> str:
    """A digest of the weights, which tells whether two engines can continue each other's answers;
    "" if it cannot be computed."""
    try:
        return sampled_digest(
            load_checkpoint(local_source(settings.model), settings.revision).folder
        )
    except (OSError, EngineError) as error:
        logger.warning("weights have no digest", extra={"error": str(error)})
        return ""


def _redis(settings: EngineSettings) -> ConnectionConfig:
    return ConnectionConfig(url=settings.redis_url, credentials=settings.redis_credentials)


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
        fetched=fetched if settings.lora_object_storage else None,
    )


def _turns(settings: EngineSettings, connection: Connection, engine_id: str) -> TurnTaking | None:
    """What takes turns with other engines; None if the engine does not share its accelerator."""
    slot = _slot(settings, connection, engine_id)
    return None if slot is None else TurnTaking(slot, settings.sharing)


def _worker_config(
    settings: EngineSettings, engine: Engine, kv_bytes_per_token: float
) -> WorkerConfig:
    return WorkerConfig(
        model=settings.name,
        name=settings.display_name,
        variant=settings.side,
        max_model_len=engine.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        block_size=settings.block_size,
        kv_bytes_per_token=kv_bytes_per_token,
        lookahead=settings.taken_ahead,
        low_priority_share=settings.low_priority_share,
        version=version("headrace"),
        beat_interval=settings.beat_interval,
        drain_timeout=settings.drain_timeout,
        stays_when_drained=settings.after_drain == "wait",
        step_timeout=settings.step_timeout,
        debug_pages=settings.debug_pages,
        sleep_pages=settings.enable_sleep_mode,
        grammar_bounds=settings.grammar_bounds,
        roles=settings.roles,
    )


def _exit(code: int) -> None:
    """Ends the process at once: a step that hangs on its device would keep it alive."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    _exit(main(phases=started))
