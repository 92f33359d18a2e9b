"""The store through which ranks of other nodes exchange their addresses with those of node 0.

Node 0's ranks use a file; the others ask node 0 over a connection that has joined. torch's own
TCPStore would open a port to everyone.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

import torch.distributed as dist

_Store: Any = getattr(dist, "Store")  # noqa: B009 - a compiled class without stubs


class RemoteStore(_Store):  # type: ignore[misc]
    """A rank's view of node 0's store. Raises RuntimeError for what node 0 cannot do."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._lock = Lock()

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, _to_text(value))

    def get(self, key: str) -> bytes:
        return _to_bytes(self._ask("get", key))

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", list(keys), None if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    def _ask(self, name: str, *operands: Any) -> Any:
        with self._lock:
            self._connection.send_bytes(json.dumps([name, *operands]).encode())
            result, problem = json.loads(self._connection.recv_bytes())
        if problem:
            raise RuntimeError(problem)
        return result


def serve_store(store: Any, connection: Connection) -> None:
    """Answers a RemoteStore from a store of torch, until its rank ends. For a thread of its own,
    which leaves the connection open: the thread that ends the engine closes it meanwhile."""
    actions: Mapping[str, Callable[..., Any]] = {
        "set": lambda key, value: store.set(key, _to_bytes(value)),
        "get": lambda key: _to_text(store.get(key)),
        "add": store.add,
        "check": store.check,
        "wait": lambda keys, seconds: _wait(store, keys, seconds),
        "delete_key": store.delete_key,
    }
    with suppress(EOFError, OSError):
        while True:
            name, *operands = json.loads(connection.recv_bytes())
            answer: tuple[Any, str]
            try:
                answer = actions[name](*operands), ""
            except RuntimeError as error:  # such as a key that is not there in time
                answer = None, str(error)
            connection.send_bytes(json.dumps(answer).encode())


def _wait(store: Any, keys: Sequence[str], seconds: float | None) -> None:
    if seconds is None:
        store.wait(keys)
    else:
        store.wait(keys, timedelta(seconds=seconds))


def _to_text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def _to_bytes(value: str) -> bytes:
    return value.encode("latin-1")
