"""Logs of the other ranks, written by rank 0: in its format, with its handlers, each with its rank.

The same connection tells each side when the other is gone.
"""

import json
import logging
from multiprocessing.connection import Connection

_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class RelayHandler(logging.Handler):
    """Sends records to rank 0; nothing where that is gone."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        fields = {key: value for key, value in vars(record).items() if key not in _OWN_FIELDS}
        if record.exc_info:
            fields["stacktrace"] = logging.Formatter().formatException(record.exc_info)
        line = [record.name, record.levelno, record.getMessage(), fields]
        try:
            self._connection.send_bytes(json.dumps(line, default=str).encode())
        except OSError:
            self.handleError(record)


def relay(connection: Connection, rank: int) -> None:
    """Logs what a rank sends, until it ends."""
    while True:
        try:
            name, level, message, fields = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        logging.getLogger(name).log(level, message, extra={**fields, "rank": rank})
