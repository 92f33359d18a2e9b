"""`headrace chat`: a streaming conversation with any OpenAI-compatible server.

The whole conversation is sent with every turn. Ctrl-C stops an answer, not the chat.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from ..errors import ChatError
from ..tables import without_controls
from ..word_wrap import WordWrapper
from .deltas import ChatDelta, deltas, error_message
from .input import MessageReader

_HELP = '/reset starts over, /exit ends, Ctrl-C stops an answer; several lines: \\ or """'
_CONNECT_SECONDS = 10.0

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """The options of a chat. `url` is the base URL, up to `/v1`. None: the server's default."""

    url: str
    model: str | None = None
    system: str | None = None
    api_key: str | None = field(default=None, repr=False)
    max_tokens: int | None = None
    temperature: float | None = None


_KEY = (
    "Give a key with --api-key or OPENAI_API_KEY; `headrace keys create NAME --file FILE` makes one"
)


class ChatClient:
    """The two HTTP calls of a chat. Raises ChatError if they fail."""

    def __init__(self, config: ChatConfig, http: httpx.AsyncClient) -> None:
        self._config = config
        self._http = http

    async def model(self) -> str:
        """The requested model, or the first one that is served."""
        if self._config.model:
            return self._config.model
        async with _readable_errors(self._config.url):
            response = await self._http.get("models")
            if response.status_code == httpx.codes.NOT_FOUND:
                raise ChatError(f"{self._config.url} is not an OpenAI API: the URL ends with /v1")
            await _check(response)
            served = response.json().get("data") or []
        if not served:
            raise ChatError(f"{self._config.url} serves no model yet")
        return str(served[0]["id"])

    async def answer(self, model: str, messages: list[Message]) -> AsyncIterator[ChatDelta]:
        """Streams the next answer."""
        optional = {
            "max_tokens": self._config.max_tokens,
            "temperature": self._config.temperature,
        }
        body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
        body |= {name: value for name, value in optional.items() if value is not None}
        async with (
            _readable_errors(self._config.url),
            self._http.stream("POST", "chat/completions", json=body) as response,
        ):
            await _check(response)
            async for delta in deltas(response.aiter_lines()):
                yield delta


@asynccontextmanager
async def _readable_errors(url: str) -> AsyncIterator[None]:
    try:
        yield
    except httpx.ConnectError as error:
        raise ChatError(f"cannot reach {url}: {error}. Is `headrace up` running?") from error
    except httpx.TransportError as error:
        raise ChatError(
            f"the connection to {url} broke: {error or type(error).__name__}"
        ) from error
    except ValueError as error:
        raise ChatError(f"{url} does not answer as an OpenAI API: {error}") from error


async def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    await response.aread()
    try:
        message = error_message(response.json())
    except ValueError:
        message = response.text[:500] or response.reason_phrase
    if response.status_code == httpx.codes.UNAUTHORIZED:
        message = f"{message.rstrip('.')}. {_KEY}"
    raise ChatError(f"HTTP {response.status_code}: {message}")


class Chat:
    """One conversation at a terminal."""

    def __init__(self, client: ChatClient, model: str, system: str | None, out: Console) -> None:
        self._client = client
        self._model = model
        self._out = out
        self._text = WordWrapper(out)
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._opening)

    def reset(self) -> None:
        self.messages = list(self._opening)

    async def say(self, text: str) -> None:
        """Sends a turn and prints the answer as it comes.

        An interrupted answer stays in the conversation; a turn without an answer does not.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            async for delta in self._client.answer(self._model, self.messages):
                self._show(delta)
                pieces.append(delta.content)
        finally:
            self._text.flush()
            self._out.print()
            if answer := "".join(pieces):
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _show(self, delta: ChatDelta) -> None:
        self._text.write(without_controls(delta.reasoning), style="dim")
        self._text.write(without_controls(delta.content))


def run_chat(config: ChatConfig, once: str | None, history: Path | None) -> None:
    """Runs a conversation until its end, or for one message. Raises ChatError.

    `history` is the file for what a person typed; None keeps nothing.
    """
    out = Console()
    with asyncio.Runner() as runner:
        http = runner.run(_open(config))
        try:
            client = ChatClient(config, http)
            chat = Chat(client, runner.run(client.model()), config.system, out)
            if once is not None:
                runner.run(chat.say(once))
            else:
                _converse(runner, chat, MessageReader(history), out)
        finally:
            runner.run(http.aclose())


async def _open(config: ChatConfig) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
    return httpx.AsyncClient(base_url=config.url, headers=headers, timeout=timeout)


def _converse(runner: asyncio.Runner, chat: Chat, messages: MessageReader, out: Console) -> None:
    out.print(_HELP, style="dim", markup=False)
    while (text := messages.read()) is not None:
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            chat.reset()
        elif text == "/help":
            out.print(_HELP, style="dim", markup=False)
        elif text:
            _turn(runner, chat, text, out)


def _turn(runner: asyncio.Runner, chat: Chat, text: str, out: Console) -> None:
    """One turn that a person may interrupt and that may fail without ending the chat."""
    try:
        runner.run(_interruptible(chat, text))
    except ChatError as error:
        out.print(f"error: {error}", style="red", markup=False, soft_wrap=True)


async def _interruptible(chat: Chat, text: str) -> None:
    task = asyncio.create_task(chat.say(text))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await asyncio.wait({task})
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    if not task.cancelled():
        task.result()
