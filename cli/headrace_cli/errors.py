"""Errors of the command line; each message says what is wrong and what to do.

CliError
├── UsageError       the arguments or the machine do not allow it; nothing was started
├── StartFailed      a process can never start; carries its last lines
└── ChatError        the server refused a chat or cannot be reached
"""


class CliError(Exception):
    code = "cli_error"


class UsageError(CliError):
    """`problem` and `remedy` are a sentence each, without its full stop."""

    code = "usage"

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}: {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


class StartFailed(CliError):
    code = "start_failed"


class ChatError(CliError):
    code = "chat_failed"
