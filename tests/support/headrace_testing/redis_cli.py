"""A stand-in for valkey-cli where only the server is installed: one command, printed as to a pipe.

Runs as a program without any package, since scripts run it many times.
"""

import os
import socket
import sys
from typing import IO, cast


def main(arguments: list[str]) -> int:
    """Options as valkey-cli has them, then the command."""
    options = {"-h": "127.0.0.1", "-p": "6379", "--user": "default"}
    while arguments and arguments[0] in options:
        options[arguments[0]] = arguments[1]
        arguments = arguments[2:]
    try:
        connection = socket.create_connection((options["-h"], int(options["-p"])), 3)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    with connection, cast(IO[bytes], connection.makefile("rwb")) as stream:
        if password := os.environ.get("REDISCLI_AUTH"):
            _ask(stream, ["AUTH", options["--user"], password])
        sys.stdout.write("\n".join([*_ask(stream, arguments), ""]))
    return 0


def _ask(stream: IO[bytes], words: list[str]) -> list[str]:
    packed = b"".join(b"$%d\r\n%s\r\n" % (len(word.encode()), word.encode()) for word in words)
    stream.write(b"*%d\r\n%s" % (len(words), packed))
    stream.flush()
    return _read(stream)


def _read(stream: IO[bytes]) -> list[str]:
    """The lines of a reply."""
    line = stream.readline().decode().rstrip()
    kind, text = line[:1], line[1:]
    if kind == "$":
        return [stream.read(int(text) + 2)[:-2].decode()] if int(text) >= 0 else [""]
    if kind == "*":
        return [each for _ in range(int(text)) for each in _read(stream)]
    return [text]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
