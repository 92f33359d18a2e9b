"""The tour of `headrace demo`: the same answers twice, the second time with an engine killed."""

import asyncio
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..errors import CliError
from ..processes.logs import LogLine
from ..tables import Output, without_controls
from ..word_wrap import WordWrapper
from .stack import ENGINES, LEASE_SECONDS, MODEL, DemoStack, RunningEngine, kill
from .streams import MAX_TOKENS, Answer, Deaf, ask_all

QUESTIONS = (
    "Tell me a story.",
    "What is Headrace?",
    "How does the queue work?",
    "Tell me about the sea.",
)
# The engine is killed once the first answer has this many pieces.
_PIECES_BEFORE = 20
_ATTEMPTS = 5
_READING_SECONDS = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of the tour.

    `same` says whether every answer has the bytes of the undisturbed one.
    """

    same: bool
    killed_pid: int
    pieces_before_kill: int
    undisturbed: list[Answer]
    disturbed: list[Answer]


class Tour:
    """One run; `out` gets the story. With `fast`, there are no pauses for reading."""

    def __init__(self, out: Console, *, fast: bool) -> None:
        self._out = out
        self._fast = fast
        self._restarted = False

    async def run(self) -> Result:
        """Raises CliError if the stack does not start, or a stream breaks."""
        with tempfile.TemporaryDirectory(prefix="headrace-demo-") as folder:
            await self._say(
                f"1. A queue (Valkey), a gateway and {ENGINES} engines start on this machine, with "
                "their data in a folder of their own."
            )
            started = time.monotonic()
            stack = await self._started(Path(folder))
            try:
                self._note(f"ready after {time.monotonic() - started:.1f} s at {stack.url}/v1")
                return await self._compare(stack)
            finally:
                self._note("the stack stops")
                await stack.stop()

    async def _started(self, folder: Path) -> DemoStack:
        if not self._out.is_terminal:
            return await DemoStack.start(folder, self._on_line)
        with self._out.status("starting"):
            return await DemoStack.start(folder, self._on_line)

    async def _compare(self, stack: DemoStack) -> Result:
        await self._say(
            f"\n2. {len(QUESTIONS)} answers are streamed at once. Nothing disturbs them; their "
            "bytes are kept for comparison."
        )
        undisturbed = await ask_all(stack.url, MODEL, QUESTIONS, Deaf())
        for answer in undisturbed:
            self._note(f"{answer.question}  {answer.size} bytes, sha256 {answer.digest}")
        await self._say(
            "\n3. The same answers again. In the middle, the engine of the first one gets SIGKILL. "
            f"(Each answer goes on to {MAX_TOKENS} tokens, so that there is time for it; the text "
            "after its natural end makes no sense.)\n"
        )
        for _ in range(_ATTEMPTS):
            kill_once = _KillOnce(stack, self._out)
            disturbed = await ask_all(stack.url, MODEL, QUESTIONS, kill_once)
            if (killed := await kill_once.killed()) is not None:
                return self._shown(undisturbed, disturbed, killed, kill_once.pieces)
            self._note("the answer was complete before its engine could be killed: once more")
        raise CliError("this machine answers faster than an engine can be killed")

    def _shown(
        self, undisturbed: list[Answer], disturbed: list[Answer], killed: RunningEngine, pieces: int
    ) -> Result:
        self._out.print("\n4. What the clients have:\n", highlight=False)
        table = Table("answer", "bytes", "longest pause", "sha256", "", box=None, pad_edge=False)
        pairs = list(zip(undisturbed, disturbed, strict=True))
        for before, after in pairs:
            verdict = "identical" if before.text == after.text else "[red]different[/]"
            table.add_row(
                after.question, str(after.size), f"{after.longest_pause:.1f} s",
                after.digest, verdict,
            )  # fmt: skip
        self._out.print(table)
        same = all(before.text == after.text for before, after in pairs)
        self._out.print(
            f"\nThe engine's lease ended after {LEASE_SECONDS} s (10 s by default). Then the other "
            "engine took its requests from the queue, with the tokens that were already there, and "
            "went on. Clients saw a pause; "
            + ("no byte is lost, repeated or changed." if same else "but answers are different.")
            + (" `headrace up` started the engine again." if self._restarted else ""),
            highlight=False,
        )
        return Result(
            same=same,
            killed_pid=killed.pid,
            pieces_before_kill=pieces,
            undisturbed=undisturbed,
            disturbed=disturbed,
        )

    async def _say(self, text: str) -> None:
        self._out.print(text, markup=False, highlight=False)
        if not self._fast:
            await asyncio.sleep(_READING_SECONDS)

    def _note(self, text: str) -> None:
        self._out.print(f"   {text}", style="dim", markup=False, highlight=False, soft_wrap=True)

    def _on_line(self, line: LogLine) -> None:
        """Records a restart; other log lines of `headrace up` are not part of the tour."""
        self._restarted |= "restarting in" in line.summary


class _KillOnce:
    """Shows the first stream, and kills the engine that computes it in the middle of it."""

    def __init__(self, stack: DemoStack, out: Console) -> None:
        self._stack = stack
        self._out = out
        self._text = WordWrapper(out)
        self._request_id = ""
        self._killing: asyncio.Task[RunningEngine | None] | None = None
        self.pieces = 0
        """Pieces of the first stream that came before the kill."""

    def begun(self, number: int, request_id: str) -> None:
        if number == 0:
            self._request_id = request_id

    def piece(self, number: int, text: str) -> None:
        if number != 0:
            return
        self._text.write(without_controls(text))
        if self._killing is None or not self._killing.done():
            self.pieces += 1
        if self._killing is None and self.pieces >= _PIECES_BEFORE:
            self._killing = asyncio.create_task(self._kill())

    async def killed(self) -> RunningEngine | None:
        """The engine that was killed; None if the answer was complete before."""
        self._text.flush()
        self._out.print()
        return None if self._killing is None else await self._killing

    async def _kill(self) -> RunningEngine | None:
        engine = await asyncio.to_thread(self._stack.engine_of, self._request_id)
        if engine is not None:
            kill(engine)
            self._text.flush()
            self._out.print(
                f"\n\n   SIGKILL to the engine of this stream (pid {engine.pid})\n",
                style="bold red",
            )
        return engine


def run_demo(output: Output, out: Console, *, fast: bool) -> bool:
    """the settings of another system"""
    for name in list(os.environ):
        if name == "REDIS_URL" or name.startswith("HEADRACE_"):
            del os.environ[name]  # settings of another system than this one
    result = asyncio.run(Tour(out, fast=fast).run())
    if output.as_json:
        output.json(asdict(result))
    return result.same
