"""Logs of the other ranks, which rank 0 writes through its own handlers, with the rank's number.

The same connection tells each process when the other one is gone.
"""

import json
import logging
from multiprocessing.connection import Connection


class RankLogHandler(logging.Handler):
    """Sends records to rank 0 as JSON; drops them if rank 0 is gone."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        fields = {**vars(record), "msg": record.getMessage(), "args": None, "exc_info": None}
        if record.exc_info:
            fields["stacktrace"] = logging.Formatter().formatException(record.exc_info)
        try:
            self._connection.send_bytes(json.dumps(fields, default=str).encode())
        except OSError:
            self.handleError(record)


def write_rank_logs(connection: Connection, rank: int) -> None:
    """Logs the records that a rank sends, until it ends, at the levels of rank 0's loggers."""
    while True:
        try:
            fields = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        record = logging.makeLogRecord({**fields, "rank": rank})
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
