"""A stand-in for valkey-cli if only the server is installed: runs one command, prints as to a pipe.

The chart's scripts run it many times, so it must start fast. It imports no package, and uses the C
module `_socket`: importing `socket` takes twice as long as the interpreter takes to start.
"""

import _socket
import os
import sys


def main(arguments: list[str]) -> int:
    """Parses valkey-cli's options and the command, and runs it."""
    options = {"-h": "127.0.0.1", "-p": "6379", "--user": "default"}
    while arguments and arguments[0] in options:
        options[arguments[0]] = arguments[1]
        arguments = arguments[2:]
    connection = _Connection()
    try:
        connection.open(options["-h"], int(options["-p"]))
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if password := os.environ.get("REDISCLI_AUTH"):
        connection.ask(["AUTH", options["--user"], password])
    sys.stdout.write("\n".join([*connection.ask(arguments), ""]))
    return 0


class _Connection:
    """A connection, which is closed when the program ends."""

    def __init__(self) -> None:
        self._socket = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        self._socket.settimeout(3)
        self._received = b""

    def open(self, host: str, port: int) -> None:
        self._socket.connect((host, port))

    def ask(self, words: list[str]) -> list[str]:
        packed = b"".join(b"$%d\r\n%s\r\n" % (len(word.encode()), word.encode()) for word in words)
        self._socket.sendall(b"*%d\r\n%s" % (len(words), packed))
        return self._reply()

    def _reply(self) -> list[str]:
        """The lines of a reply."""
        while b"\n" not in self._received:
            self._receive()
        line, _, self._received = self._received.partition(b"\r\n")
        kind, text = line[:1], line[1:].decode()
        if kind == b"$":
            return [self._bulk(int(text))]
        if kind == b"*":
            return [each for _ in range(int(text)) for each in self._reply()]
        return [text]

    def _bulk(self, size: int) -> str:
        if size < 0:
            return ""
        while len(self._received) < size + 2:
            self._receive()
        text, self._received = self._received[:size], self._received[size + 2 :]
        return text.decode()

    def _receive(self) -> None:
        """Raises OSError when the server has closed the connection."""
        more = self._socket.recv(65536)
        if not more:
            raise OSError("the server closed the connection")
        self._received += more


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
