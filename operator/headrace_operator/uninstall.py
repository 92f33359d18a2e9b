"""Deletes the ModelServices before their release is uninstalled, and waits until no engine is left.

Helm runs it while the release's operator and Redis still run, so that engines finish their work and
none remains without its queue.
"""

import argparse
import asyncio
import logging
import sys
from typing import Any

from headrace_common.observability import logs

from . import names
from .__main__ import configuration
from .cluster.cluster import Cluster
from .errors import ClusterError, NotFound

logger = logging.getLogger("headrace_operator.uninstall")

Manifest = dict[str, Any]
POLL_S = 1.0


async def remove_all(cluster: Cluster, namespace: str | None) -> None:
    """Deletes the ModelServices of one namespace (None: of all). Raises ClusterError."""
    for body in await _services(cluster, namespace):
        meta = body["metadata"]
        await cluster.delete(names.API_VERSION, names.KIND, meta["namespace"], meta["name"])
        logger.info("ModelService deleted", extra={"model_service": meta["name"]})
    while left := [*await _services(cluster, namespace), *await _engines(cluster, namespace)]:
        logger.info(
            "waiting until all are gone",
            extra={"left": [body["metadata"]["name"] for body in left]},
        )
        await asyncio.sleep(POLL_S)


async def _services(cluster: Cluster, namespace: str | None) -> list[Manifest]:
    try:
        return await cluster.list(names.API_VERSION, names.KIND, namespace, {})
    except NotFound:
        return []  # the definition was deleted, and with it every object


async def _engines(cluster: Cluster, namespace: str | None) -> list[Manifest]:
    labels = {names.MANAGED_BY: names.FIELD_MANAGER, names.COMPONENT: "engine"}
    return await cluster.list("v1", "Pod", namespace, labels)


async def _run(namespace: str | None) -> None:
    cluster = Cluster(await configuration())
    try:
        await remove_all(cluster, namespace)
    finally:
        await cluster.close()


def main(arguments: list[str] | None = None) -> int:
    """Returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="headrace_operator.uninstall")
    parser.add_argument("--namespace", help="only of this one; default: of all")
    given = parser.parse_args(arguments)
    logs.configure("INFO", "json")
    try:
        asyncio.run(_run(given.namespace))
    except ClusterError as error:
        logger.error("ModelServices not deleted", extra={"code": error.code, "error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
