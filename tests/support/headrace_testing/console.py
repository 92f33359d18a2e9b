"""The gateway's console as a person uses it in a browser."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
from playwright.sync_api import Locator, Page, expect

from .browser import TIMEOUT_MS
from .headrace_up import MODEL
from .processes import until

STORY = "Tell me a story."
# Two engines whose requests are soon taken over if one dies; little memory, so that its use is
# visible.
UP_FLAGS = (
    "--engines", "2", "--", "--lease", "1", "--beat-interval", "0.25", "--kv-cache-memory", "24MiB",
)  # fmt: skip


class Console:
    """The page of one server, and the model that its chat chooses."""

    def __init__(self, page: Page, url: str, model: str = MODEL) -> None:
        self.page = page
        self._url = url
        self._model = model

    def open(self, view: str = "chat") -> None:
        self.page.goto(f"{self._url}/#{view}")
        expect(self.page.locator(f"#view-{view}")).to_be_visible(timeout=TIMEOUT_MS)
        if view == "chat":  # the list of models has come
            expect(self.page.locator("#p-model")).to_have_value(self._model, timeout=TIMEOUT_MS)

    @property
    def answer(self) -> Locator:
        return self.page.locator(".answer").last

    @property
    def text(self) -> str:
        return self.answer.locator(".text:not(.reasoning-text)").first.text_content() or ""

    @property
    def figures(self) -> str:
        return self.answer.locator(".figures").text_content() or ""

    def set(self, **fields: float | str) -> None:
        """Sets parameters; `extra` are other fields of the request, as JSON."""
        if {"extra", "tools"} & set(fields):
            self.page.locator("#more-parameters").evaluate("part => { part.open = true; }")
        for name, value in fields.items():
            self.page.fill(f"#p-{name}", str(value))

    def long_story(self, tokens: int) -> dict[str, Any]:
        """Sets the parameters of a greedy stream of `tokens` tokens; returns the body of the
        request."""
        self.set(temperature=0, max_tokens=tokens, extra='{"ignore_eos": true}')
        return story(tokens)

    def send(self, text: str) -> None:
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")

    def until_streaming(self, characters: int = 1) -> None:
        """Waits for text of an answer that has not ended."""
        text = self.answer.locator(".text:not(.reasoning-text)").first
        until(lambda: len(text.text_content() or "") >= characters, "text of the answer")
        assert self.answer.get_attribute("aria-busy") == "true", "the answer has ended already"

    def until_answered(self) -> None:
        """Waits for the end of an answer. Fails if it ends with an error."""
        expect(self.answer).to_have_attribute("aria-busy", "false", timeout=TIMEOUT_MS)
        failure = self.answer.locator(".notice.bad")
        assert not failure.count(), failure.first.text_content()

    def ask(self, text: str) -> str:
        """Sends a message and returns the whole answer."""
        self.send(text)
        expect(self.answer).to_be_visible()
        self.until_answered()
        return self.text

    def focused(self) -> str:
        """The focused element: its id, or else its text."""
        found = self.page.evaluate(
            "(document.activeElement.id || document.activeElement.textContent).trim()"
        )
        return str(found)

    def tab_to(self, wanted: str, most: int = 60) -> None:
        """Presses the tab key until this id or text has the focus."""
        for _ in range(most):
            self.page.keyboard.press("Tab")
            if self.focused() == wanted:
                return
        raise AssertionError(f"{wanted!r} does not get the focus in {most} steps")


def story(tokens: int) -> dict[str, Any]:
    """The body of a greedy story of `tokens` tokens."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": STORY}],
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
    }


def undisturbed(url: str, body: Mapping[str, Any]) -> str:
    """Returns the text of the answer, requested without a stream."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=dict(body), timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def snapshot(url: str) -> dict[str, Any]:
    """The current snapshot of the server, as the console gets it."""
    text = httpx.get(f"{url}/console/live?events=1", timeout=60).text
    (data,) = [line for line in text.splitlines() if line.startswith("data: ")]
    content: dict[str, Any] = json.loads(data.removeprefix("data: "))
    return content


def requests(url: str) -> list[dict[str, Any]]:
    """The recent requests, the newest first."""
    content = httpx.get(f"{url}/console/requests", timeout=60).json()
    found: list[dict[str, Any]] = content["requests"]
    return found


def until_calm(url: str) -> None:
    """Waits until both engines are ready and nothing runs."""

    def ready() -> bool:
        states = [engine["state"] for engine in snapshot(url)["engines"]]
        return states.count("ready") == 2

    until(lambda: _answers(url) and ready() and idle(url), "two engines without requests")


def _answers(url: str) -> bool:
    """Whether the gateway answers: it may have been killed just now."""
    try:
        return httpx.get(f"{url}/health/live").status_code == 200
    except httpx.TransportError:
        return False


def idle(url: str) -> bool:
    """Whether no request runs or waits, in the queue and in all engines."""
    now = snapshot(url)
    queued = [model["waiting"] + model["running"] for model in now["models"]]
    return not any(queued) and not any(engine["running"] for engine in now["engines"])
