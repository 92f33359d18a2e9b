"""The process of a node other than node 0: its ranks, its metrics port with health, its signals."""

import logging
import os
import signal
import socket
from importlib.metadata import version

from headrace_common.observability import telemetry
from headrace_common.termination import SIGNALS

from ..core.start_phases import StartPhases
from ..distributed.rank_node import RankNode
from .settings import EngineSettings

logger = logging.getLogger(__name__)


def run_rank_node(settings: EngineSettings, phases: StartPhases) -> None:
    """Runs until node 0 stops the engine. Once the ranks of all nodes are connected, SIGTERM makes
    the engine drain; before, it ends the process. Raises EngineError if the engine fails or node 0
    refuses this node."""
    phases.begin("device")
    node = RankNode(settings.engine_config())
    phases.begin("telemetry")
    measures = telemetry.setup(
        "headrace-engine",
        version=version("headrace"),
        instance_id=f"{socket.gethostname()}.{os.getpid()}",
        metrics_host=settings.metrics_host,
        metrics_port=settings.metrics_port,
        metrics_fd=settings.metrics_fd,
        ready=node.not_ready,
    )

    def connected() -> None:
        for number in SIGNALS:
            signal.signal(number, lambda *_: node.drain())
        phases.end()
        extra = {"node": settings.node_rank, **phases.summary()}
        logger.info("node ready", extra=extra)

    try:
        phases.begin("nodes")
        node.serve(connected)
    finally:
        measures.shutdown()
