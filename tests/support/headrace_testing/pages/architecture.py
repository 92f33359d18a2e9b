"""Writes the tables of docs/architecture.md: subpackages by layer, and functions of a request.

A test compares the page with the one made here; `make generated` renews it.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..import_layers import ROOT, contracts

PAGE = ROOT / "docs" / "architecture.md"
SOURCES = {
    "headrace_cli": "cli",
    "headrace_common": "common",
    "headrace_engine": "engine",
    "headrace_gateway": "service",
    "headrace_operator": "operator",
}


@dataclass(frozen=True, slots=True)
class Stop:
    """A function that handles a request, and what it does."""

    file: str
    function: str
    does: str

    @property
    def link(self) -> str:
        """Returns a link to the line of a function.

        Fails if the file has no such function, or two of them.
        """
        lines = [line for name, line in functions(self.file) if name.endswith(f".{self.function}")]
        assert len(lines) == 1, f"{self.file} has {len(lines)} functions named {self.function}"
        return f"[`{Path(self.file).name}`: `{self.function}`](../{self.file}#L{lines[0]})"


def functions(file: str) -> Iterator[tuple[str, int]]:
    """Functions and methods of a file as .name and .Class.name, with their lines."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    tree = ast.parse((ROOT / file).read_text())
    for node in tree.body:
        if isinstance(node, kinds):
            yield f".{node.name}", node.lineno
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, kinds):
                    yield f".{node.name}.{each.name}", each.lineno


_GATEWAY = "service/headrace_gateway"
_ENGINE = "engine/headrace_engine"
_QUEUE = "common/headrace_common/protocol/redis"
TO_THE_QUEUE = (
    Stop(f"{_GATEWAY}/http/routes/chat.py", "create_chat_completion", "reads and checks the body"),
    Stop(
        f"{_GATEWAY}/generation/pipeline.py",
        "generate",
        "turns messages into token ids, checks lengths and limits, builds the response",
    ),
    Stop(f"{_GATEWAY}/generation/generation_response.py", "queued", "queues before it answers"),
    Stop(f"{_GATEWAY}/generation/admission.py", "submit", "queues every prompt, or none"),
    Stop(
        f"{_GATEWAY}/queue_client/client.py",
        "submit",
        "registers the request as active, so that replies can be assigned to it",
    ),
    Stop(f"{_QUEUE}/gateway.py", "admit", "runs ADMIT: the request is queued or refused"),
)
FROM_THE_QUEUE = (
    Stop(f"{_QUEUE}/engine.py", "take", "runs TAKE: the engine has a lease"),
    Stop(f"{_ENGINE}/serving/worker.py", "_intake", "asks for as many requests as can start"),
    Stop(f"{_ENGINE}/serving/request_tracker.py", "begin", "keeps the lease, starts the request"),
    Stop(f"{_ENGINE}/engine/engine_loop.py", "_turn", "the engine's thread: commands, then a step"),
    Stop(f"{_ENGINE}/engine/engine.py", "step", "one step: schedule, execute, update"),
    Stop(f"{_ENGINE}/scheduler/scheduler.py", "schedule", "decides what the step computes"),
    Stop(f"{_ENGINE}/model_runner/model_runner.py", "_launch", "runs the model and the sampler"),
    Stop(f"{_ENGINE}/scheduler/scheduler.py", "update", "appends the tokens, ends sequences"),
    Stop(f"{_ENGINE}/serving/worker.py", "_on_step", "back on the event loop, with the outputs"),
    Stop(f"{_ENGINE}/serving/request_tracker.py", "on_output", "turns the output into a reply"),
    Stop(f"{_ENGINE}/serving/reply_writer.py", "run", "writes replies, then outcomes"),
    Stop(f"{_QUEUE}/engine.py", "publish", "puts one frame for each gateway into its stream"),
)
TO_THE_CLIENT = (
    Stop(f"{_GATEWAY}/queue_client/client.py", "_dispatch", "gives each reply to its generation"),
    Stop(f"{_GATEWAY}/queue_client/generation.py", "handle", "asks the arbiter what is new"),
    Stop(
        f"{_GATEWAY}/queue_client/run.py", "read", "turns token ids into text, finds stop strings"
    ),
    Stop(f"{_GATEWAY}/generation/direct_stream.py", "_make", "turns the text into events"),
    Stop(f"{_GATEWAY}/streaming/sse.py", "EventStream.write", "writes them to the connection"),
)
HANG_UP = (
    Stop(
        f"{_GATEWAY}/streaming/disconnecting_response.py",
        "_serve",
        "watches the connection while the answer is made",
    ),
    Stop(f"{_GATEWAY}/generation/generation_response.py", "_leave", "cancels the unread answers"),
    Stop(f"{_GATEWAY}/queue_client/client.py", "_abandon", "runs CANCEL, which tells the engine"),
    Stop(
        f"{_ENGINE}/serving/request_tracker.py",
        "handle_control",
        "ends the request in the engine, frees its KV blocks",
    ),
)
TAKEOVER = (
    Stop(
        f"{_GATEWAY}/queue_client/watchdog.py",
        "_is_silent",
        "notices that nothing is heard of the engine",
    ),
    Stop(
        f"{_GATEWAY}/queue_client/watchdog.py",
        "_release_if_silent",
        "releases the request (GIVEBACK), so that it can be reaped at once",
    ),
    Stop(
        f"{_ENGINE}/serving/worker.py",
        "_reap",
        "another engine gets released requests, and those whose lease has expired (`reap.lua`)",
    ),
    Stop(
        f"{_ENGINE}/serving/request_tracker.py",
        "_take_over",
        "asks what the client has, continues after it",
    ),
)
STOP = (
    Stop(f"{_ENGINE}/__main__.py", "serve", "calls `Worker.end` at SIGTERM"),
    Stop(f"{_ENGINE}/serving/worker.py", "end", "takes no more requests"),
    Stop(
        f"{_ENGINE}/serving/worker.py",
        "_finish",
        "waits for running requests, at most for `drain_timeout`",
    ),
    Stop(
        f"{_ENGINE}/serving/request_tracker.py",
        "give_back",
        "gives the others back to the queue (GIVEBACK)",
    ),
)
OTHER_DECISIONS = (
    Stop("operator/headrace_operator/scaling/decision.py", "decide", "the number of engines"),
    Stop(
        "common/headrace_common/protocol/requests.py",
        "queue_full",
        "the seconds of Retry-After when the queue is full",
    ),
    Stop(
        f"{_GATEWAY}/limits/rate_limits.py",
        "_refusal",
        "the seconds of Retry-After when an API key is at its limit",
    ),
    Stop(
        f"{_GATEWAY}/errors.py",
        "headers",
        "writes Retry-After; other retryable errors use `RETRY_SOON_S`",
    ),
    Stop(f"{_QUEUE}/gateway.py", "admit", "seals the request before Redis stores it"),
    Stop(
        f"{_ENGINE}/kv_cache/memory_budget.py",
        "count_blocks",
        "the number of KV blocks",
    ),
)


def way(stops: Sequence[Stop]) -> str:
    """A table of functions, in the order in which a request reaches them."""
    rows = [f"| {number} | {stop.link} | {stop.does} |" for number, stop in enumerate(stops, 1)]
    return "\n".join(["| | function | what it does |", "| --- | --- | --- |", *rows])


def files(stops: Sequence[Stop]) -> set[str]:
    """The files of the gateway or engine that contain the functions; files of the queue are not
    counted."""
    return {stop.file for stop in stops if not stop.file.startswith(_QUEUE)}


def tables() -> str:
    """A table for each package: its subpackages from the highest layer to the lowest."""
    parts = []
    for package, layers in contracts():
        folder = Path(SOURCES[package], package)
        rows = [
            _row(folder / subpackage, number)
            for number, line in enumerate(layers)
            for subpackage in line
        ]
        head = [f"### {package}", "", "| layer | subpackage | purpose |", "| --- | --- | --- |"]
        parts.append("\n".join([*head, *rows]))
    return "\n\n".join(parts)


def page(text: str) -> str:
    """The page with its tables renewed."""
    text = _replaced(text, "to the queue", way(TO_THE_QUEUE))
    text = _replaced(text, "from the queue", way(FROM_THE_QUEUE))
    text = _replaced(text, "to the client", way(TO_THE_CLIENT))
    text = _replaced(text, "hang-up", way(HANG_UP))
    text = _replaced(text, "takeover", way(TAKEOVER))
    text = _replaced(text, "stop", way(STOP))
    text = _replaced(text, "other decisions", way(OTHER_DECISIONS))
    return _replaced(text, "packages", tables())


def _replaced(text: str, part: str, content: str) -> str:
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{content}\n{end}{after}"


def _row(subpackage: Path, layer: int) -> str:
    source = (
        subpackage / "__init__.py"
        if (ROOT / subpackage).is_dir()
        else subpackage.with_suffix(".py")
    )
    doc = ast.get_docstring(ast.parse((ROOT / source).read_text()))
    assert doc is not None, f"{source} has no docstring"
    first = " ".join(doc.split("\n\n")[0].split())
    link = subpackage if (ROOT / subpackage).is_dir() else source
    return f"| {layer} | [`{subpackage.name}`](../{link}) | {first} |"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
