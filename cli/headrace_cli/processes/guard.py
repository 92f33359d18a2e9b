"""Starts a program that dies with its parent: `guard.py PARENT_PID PIPE_FD PROGRAM ARG...`.

Run by path with `python -I -S`, so it may import the standard library only. Linux ends the program
through its parent-death signal; elsewhere a watcher process waits for end-of-file on PIPE_FD, whose
other end only the parent holds.
"""

import ctypes
import os
import selectors
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> NoReturn:
    parent, pipe, program = int(argv[0]), int(argv[1]), argv[2:]
    if sys.platform == "linux":
        die_with_parent()
        os.close(pipe)
    else:
        watch(pipe)
    if os.getppid() != parent:  # it died before the signal was set
        sys.exit("the parent process is gone")
    try:
        os.execvp(program[0], program)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"cannot run {program[0]}: {error.strerror}\n")
        sys.exit(os.EX_CONFIG)


def die_with_parent() -> None:
    """Asks the kernel for SIGKILL when the parent ends; the request outlives exec."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def watch(pipe: int) -> None:
    """Forks a watcher that kills this process (and what it becomes) at end-of-file on `pipe`.

    A second pipe, whose writing end the program inherits, ends the watcher with the program.
    """
    alive_read, alive_write = os.pipe()
    program = os.getpid()
    if os.fork() == 0:
        os.close(alive_write)
        _watch(pipe, alive_read, program)
    os.close(alive_read)
    os.close(pipe)
    os.set_inheritable(alive_write, True)


def _watch(parent: int, program_alive: int, program: int) -> NoReturn:
    os.setsid()  # signals to the program's group are not for the watcher
    with selectors.DefaultSelector() as selector:
        selector.register(parent, selectors.EVENT_READ)
        selector.register(program_alive, selectors.EVENT_READ)
        ended = {key.fd for key, _ in selector.select()}
    if program_alive not in ended and os.getppid() == program:
        os.kill(program, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
