"""The console in a real browser, against real gateways and engines."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Request, Route, expect

from headrace_testing.api_keys import KeyBook
from headrace_testing.browser import TIMEOUT_MS, WatchedPage, chromium, kept_context
from headrace_testing.console import (
    STORY,
    Console,
    idle,
    requests,
    snapshot,
    story,
    until_calm,
)
from headrace_testing.headrace_up import MODEL, UpProcess
from headrace_testing.processes import until
from headrace_testing.stack import GatewayProcess

VIEWS = ("chat", "live", "requests")
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
# Of tokens: a busy browser sees an answer of this length before it ends; a person with a keyboard
# kills its engine before the longest one ends.
LONG, LONGEST = 180, 400
END = "<|im_end|>"  # a special token, which has no text


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def up(browser: Browser, paced_up: UpProcess) -> UpProcess:
    return paced_up


@pytest.fixture(scope="module")
def tokens(up: UpProcess) -> list[str]:
    """The texts of the longest story's tokens, requested without a stream. Shorter stories are its
    beginning."""
    until_calm(up.url)
    body = story(LONGEST) | {"logprobs": True}
    answer = httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    named = [entry["token"] for entry in answer.json()["choices"][0]["logprobs"]["content"]]
    return ["" if token == END else token for token in named]


@pytest.fixture(scope="module")
def context(browser: Browser, up: UpProcess) -> Iterator[BrowserContext]:
    with kept_context(browser, up.url) as context:
        yield context


@pytest.fixture
def watched(context: BrowserContext) -> Iterator[WatchedPage]:
    """A page whose console must stay empty."""
    watched = WatchedPage(context)
    yield watched
    watched.close()
    context.pages[0].evaluate("localStorage.clear()")
    assert watched.faults == []


@pytest.fixture
def console(watched: WatchedPage, up: UpProcess) -> Iterator[Console]:
    until_calm(up.url)
    yield Console(watched.page, up.url)


# Chat


def test_a_chat_streams_the_answer_of_the_api(console: Console, tokens: list[str]) -> None:
    console.open()
    console.long_story(90)
    console.send(STORY)
    console.until_streaming()
    console.until_answered()
    assert console.text == "".join(tokens[:90])
    assert re.match(
        r"first token after [\d.]+ m?s · [\d.,]+ tokens/s · 90 tokens · prompt 13",
        console.figures,
    )


def test_stop_ends_the_request_in_its_engine(console: Console, up: UpProcess) -> None:
    console.open()
    console.long_story(LONG)
    console.send(STORY)
    console.until_streaming()
    console.page.click("#stop")
    console.until_answered()
    assert "stopped" in console.figures
    until(lambda: idle(up.url), "the engine to stop")
    newest = requests(up.url)[0]
    assert newest["state"] == "cancelled"
    assert newest["output_tokens"] < LONG


def test_a_stream_continues_after_its_gateway_was_killed(
    console: Console, watched: WatchedPage, up: UpProcess, tokens: list[str]
) -> None:
    console.open()
    console.long_story(LONG)
    console.send(STORY)
    console.until_streaming(characters=200)
    up.child("headrace_gateway").send_signal(signal.SIGKILL)
    console.until_answered()
    assert console.text == "".join(tokens[:LONG])
    watched.faults[:] = [fault for fault in watched.faults if "Failed to load" not in fault]


def test_an_answer_is_regenerated_and_the_last_message_edited(console: Console) -> None:
    console.open()
    console.set(temperature=0)
    first = console.ask("Hello!")
    console.page.get_by_role("button", name="Regenerate").click()
    console.until_answered()
    assert console.text == first
    console.page.get_by_role("button", name="Edit").click()
    editor = console.page.get_by_label("Your message")
    editor.fill(STORY)
    editor.press("Enter")
    expect(console.page.locator(".turn.user .text")).to_have_text([STORY])
    console.until_answered()
    assert console.text not in ("", first)
    assert console.page.locator(".answer").count() == 1


def test_the_chosen_choice_is_part_of_the_next_request(console: Console) -> None:
    console.open()
    console.set(n=3, temperature=1, seed=1, max_tokens=20)
    console.ask(STORY)
    choices = console.page.locator(".choice")
    expect(choices).to_have_count(3)
    texts = choices.locator(".text:not(.reasoning-text)").all_text_contents()
    assert all(texts)
    choices.nth(1).get_by_label("Go on with this one").check()
    console.set(n=1)
    with console.page.expect_request("**/v1/chat/completions") as sent:
        console.send("Hello!")
    messages = body_of(sent.value)["messages"]
    assert [message["content"] for message in messages] == [STORY, texts[1], "Hello!"]
    console.until_answered()


def test_token_probabilities_are_shown(console: Console) -> None:
    console.open()
    console.set(temperature=0, top_logprobs=3)
    console.page.check("#p-logprobs")
    text = console.ask(STORY)
    tokens = console.page.locator(".token")
    assert "".join(tokens.all_text_contents()) == text
    tokens.nth(4).hover()
    tip = console.page.locator("#tooltip")
    expect(tip.locator("tr")).to_have_count(3)
    expect(tip.locator(".chosen code")).to_have_text(tokens.nth(4).text_content() or "")
    tokens.first.focus()
    console.page.keyboard.press("ArrowRight")
    expect(tip.locator(".chosen code")).to_have_text(tokens.nth(1).text_content() or "")


def test_a_chat_is_copied_as_code_without_the_key(console: Console, up: UpProcess) -> None:
    console.open()
    console.set(max_tokens=5, extra='{"ignore_eos": true}')
    console.page.fill("#message", "It's me.")
    console.page.get_by_role("button", name="Copy as code").click()
    code = console.page.locator("#code-text")
    assert f"curl -N {up.url}/v1/chat/completions" in code.input_value()
    assert "It'\\''s me." in code.input_value()
    console.page.get_by_label("Python").check()
    compiled = compile(code.input_value(), "copied", "exec")
    assert 'extra_body={"ignore_eos": True}' in code.input_value()
    assert "OpenAI" in compiled.co_names


def test_a_model_that_reads_text_only_is_offered_no_pictures(console: Console) -> None:
    page = console.page
    console.open()
    expect(page.locator("#add-picture")).to_be_hidden()
    page.locator("#conversation").evaluate(
        """element => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File(["x"], "x.png", { type: "image/png" }));
            const options = { dataTransfer, bubbles: true, cancelable: true };
            element.dispatchEvent(new DragEvent("drop", options));
        }"""
    )
    expect(page.locator("#toast")).to_have_text(f"{MODEL} reads text only.")
    expect(page.locator("#pictures")).to_be_hidden()


def test_a_field_that_is_not_json_is_refused_before_anything_is_sent(console: Console) -> None:
    console.open()
    console.set(tools="[")
    console.send("Hello!")
    expect(console.page.locator("#e-tools")).to_contain_text("This is not JSON")
    assert console.focused() == "p-tools"
    assert console.page.locator(".turn").count() == 0


def test_tool_calls_and_reasoning_are_shown_and_a_result_is_sent(console: Console) -> None:
    """The browser gets the events of a model that does both in one answer."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "reasoning_content": "The city "},
        {"reasoning_content": "is Ulm."},
        {"tool_calls": [{"index": 0, **call}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Ulm"}'}}]},
    ]
    console.open()
    console.page.route("**/v1/chat/completions", lambda route: answer_with(route, deltas))
    console.page.locator("#more-parameters").evaluate("part => { part.open = true; }")
    console.page.get_by_role("button", name="Insert an example tool").click()
    console.ask("How is the weather in Ulm?")
    answer = console.answer
    expect(answer.locator(".reasoning-text")).to_be_hidden()
    answer.locator(".reasoning summary").click()
    expect(answer.locator(".reasoning-text")).to_have_text("The city is Ulm.")
    expect(answer.locator(".call")).to_contain_text("get_weather")
    expect(answer.locator(".call pre")).to_have_text('{\n  "city": "Ulm"\n}')
    console.page.unroute("**/v1/chat/completions")
    sunny: list[dict[str, Any]] = [{"content": "Sunny."}]
    console.page.route("**/v1/chat/completions", lambda route: answer_with(route, sunny))
    answer.get_by_label("Result of get_weather").fill("sunny")
    with console.page.expect_request("**/v1/chat/completions") as sent:
        answer.get_by_role("button", name="Send result").click()
    body = body_of(sent.value)
    assert body["tools"][0]["function"]["name"] == "get_weather"
    assert body["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    assert body["messages"][-2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Ulm"}'
    expect(console.answer.locator(".text:not(.reasoning-text)")).to_have_text("Sunny.")


def body_of(request: Request) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(request.post_data or "")
    return body


def answer_with(route: Route, deltas: list[dict[str, Any]]) -> None:
    """Answers a request with the events of a stream."""
    finish = "tool_calls" if "tool_calls" in deltas[-1] else "stop"
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": delta, "finish_reason": None} for delta in deltas
    ]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    events = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
    body = "".join([*events, "data: [DONE]\n\n"])
    route.fulfill(status=200, content_type="text/event-stream", body=body)


# Live and Requests


def test_live_shows_the_states_of_a_request_while_sixteen_run(
    console: Console, up: UpProcess
) -> None:
    page = console.page
    console.open("live")
    expect(page.locator(".engine")).to_have_count(2)
    for summary in page.locator(".sequences summary").all():
        summary.click()
    page.fill("#load-count", "16")
    page.click("#load-send")
    rows = page.locator(".sequences tbody tr")
    expect(rows).to_have_count(16, timeout=TIMEOUT_MS)
    expect(page.locator(".model dd").nth(1)).to_have_text("16")
    states = set(rows.locator("td:nth-child(2)").all_text_contents())
    assert states <= {"waiting", "prefill", "decode", "preempted", "swapped"}
    name = rows.first.locator("td").first.text_content() or ""
    row = rows.filter(has_text=name)
    expect(row.locator("td:nth-child(2)")).to_have_text("decode", timeout=TIMEOUT_MS)
    before = int(row.locator("td:nth-child(5)").text_content() or "")
    until(lambda: int(row.locator("td:nth-child(5)").text_content() or "") > before, "its tokens")
    names = rows.locator("td:first-child")
    running = set(names.all_text_contents())
    until(lambda: running > set(names.all_text_contents()), "one of them to end")
    ended = min(running - set(names.all_text_contents()))
    page.click("#load-stop")

    page.get_by_role("link", name="Requests").click()
    line = page.locator("#request-rows tr").filter(has_text=ended)
    expect(line.locator(".badge")).to_have_text("length", timeout=TIMEOUT_MS)
    timeline = line.locator(".timeline").get_attribute("aria-label") or ""
    assert re.search(r"prefill .*decode ", timeline)
    line.get_by_role("button").click()
    expect(page.locator(".event-list li").first).to_have_text("0 ms: accepted")
    expect(page.locator(".event-list li").last).to_contain_text("ended")
    until(lambda: idle(up.url), "the other requests to be cancelled")


def test_sample_requests_are_cancelled(console: Console, up: UpProcess) -> None:
    console.open("live")
    console.page.fill("#load-count", "4")
    console.page.click("#load-send")
    console.page.get_by_role("button", name="Cancel them").click()
    until(lambda: idle(up.url), "the sample requests to be cancelled")
    assert {request["state"] for request in requests(up.url)[:4]} == {"cancelled"}


def test_the_animation_runs_and_pauses(console: Console, up: UpProcess) -> None:
    page = console.page
    page.emulate_media(reduced_motion="no-preference")
    console.open("live")
    page.fill("#load-count", "8")
    page.click("#load-send")
    expect(page.locator(".model dd").nth(1)).to_have_text("8", timeout=TIMEOUT_MS)
    # An engine is drawn once its first details have come.
    expect(page.locator(".picture canvas:visible")).to_have_count(2, timeout=TIMEOUT_MS)
    drawn = pixels(page)
    until(lambda: pixels(page) != drawn, "the picture to move")
    page.get_by_role("button", name="Pause the picture").click()
    drawn = pixels(page)
    before = steps(up)
    until(lambda: steps(up) > before + 10 or idle(up.url), "some steps of the engines")
    assert pixels(page) == drawn
    page.set_viewport_size({"width": 900, "height": 900})
    until(lambda: pixels(page) != drawn, "the picture to have the new width")
    assert all(coloured(page)), "a new size empties the paused picture"
    page.click("#load-stop")


def pixels(page: Page) -> list[str]:
    return [
        str(canvas.evaluate("canvas => canvas.toDataURL()"))
        for canvas in page.locator(".picture canvas").all()
    ]


def coloured(page: Page) -> list[bool]:
    """For each canvas: has it a pixel with a colour?"""
    script = """canvas => canvas.getContext("2d")
        .getImageData(0, 0, canvas.width, canvas.height).data.some(value => value > 0)"""
    return [bool(canvas.evaluate(script)) for canvas in page.locator(".picture canvas").all()]


def steps(up: UpProcess) -> int:
    return sum(int(engine.get("steps") or 0) for engine in snapshot(up.url)["engines"])


def test_a_stream_of_a_killed_engine_ends_with_the_same_bytes(
    console: Console, up: UpProcess, tokens: list[str]
) -> None:
    """The keyboard alone is used: the person writes, sends, kills the engine and confirms."""
    console.open()
    console.long_story(LONGEST)
    page = console.page
    page.locator("#message").focus()
    page.keyboard.type(STORY)
    page.keyboard.press("Enter")
    kill = page.locator(".whereabouts button")
    expect(kill).to_be_visible(timeout=TIMEOUT_MS)
    name = (kill.text_content() or "").removeprefix("Kill ")
    page.keyboard.press("Shift+Tab")
    while console.focused() != f"Kill {name}":
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Cancel", exact=True)).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    console.until_answered()
    assert console.text == "".join(tokens)
    assert f"{name} was killed" in console.figures and "no token was lost" in console.figures
    events = [event["what"] for event in requests(up.url)[0]["events"]]
    assert "moved" in events


def test_a_kill_that_is_not_confirmed_kills_nothing(console: Console, up: UpProcess) -> None:
    console.open("live")
    before = {engine["id"] for engine in snapshot(up.url)["engines"]}
    button = console.page.get_by_role("button", name="Kill engine-0")
    button.click()
    console.page.keyboard.press("Escape")
    expect(button).to_be_focused()
    assert {engine["id"] for engine in snapshot(up.url)["engines"]} == before


# Accessibility


def test_all_views_are_reached_with_the_keyboard(console: Console) -> None:
    console.open()
    page = console.page
    page.keyboard.press("Tab")
    assert console.focused() == "Skip to content"
    for view in ("Live", "Requests", "Chat"):
        page.locator("body").evaluate("() => document.activeElement.blur()")
        console.tab_to(view)
        page.keyboard.press("Enter")
        expect(page.locator(f"#view-{view.lower()}")).to_be_visible()
        expect(page).to_have_title(f"{view} – Headrace")
    console.tab_to("message")
    page.keyboard.type("Hello!")
    console.tab_to("send")
    page.keyboard.press("Enter")
    expect(console.answer).to_be_visible()
    console.until_answered()
    assert console.text


def test_axe_finds_no_violation(console: Console) -> None:
    """In each view, with each colour scheme."""
    page = console.page
    console.open()
    page.check("#p-logprobs")
    console.set(n=2, max_tokens=30, extra="{}")
    console.ask(STORY)
    for view in VIEWS:
        console.open(view)
        if view == "live":
            expect(page.locator(".engine")).to_have_count(2)
            for summary in page.locator(".sequences summary").all():
                summary.click()
        if view == "requests":
            page.locator("#request-rows button").first.click()
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            expect(page.locator("html")).to_have_attribute("data-theme", scheme)
            found = Axe().run(page)
            assert found.violations_count == 0, f"{view}, {scheme}: {found.generate_report()}"


def test_the_theme_is_switched_and_remembered(console: Console) -> None:
    console.page.emulate_media(color_scheme="light")
    console.open()
    console.page.get_by_role("button", name="Dark").click()
    console.page.reload()
    expect(console.page.locator("html")).to_have_attribute("data-theme", "dark")


def test_reduced_motion_is_respected(console: Console) -> None:
    console.page.emulate_media(reduced_motion="reduce")
    console.page.add_init_script(
        "window.frames_asked = 0; const ask = requestAnimationFrame;"
        "window.requestAnimationFrame = (f) => { window.frames_asked++; return ask(f); };"
    )
    console.open("live")
    expect(console.page.locator(".engine")).to_have_count(2)
    assert console.page.evaluate("window.frames_asked") == 0


def test_the_api_key_is_requested_and_stored_in_the_tab_only(
    browser: Browser, up: UpProcess, tmp_path: Path
) -> None:
    """Another gateway of the same queue has keys."""
    keys = KeyBook(tmp_path / "keys.yaml")
    secret = keys.add("alice", tenant="team-a")
    flags = ("--model", MODEL, "--api-keys-file", str(keys.path))
    watched = WatchedPage(browser.new_context())
    with GatewayProcess(None, up.redis_url, tmp_path / "gateway.log", *flags) as gateway:
        until(lambda: gateway.ready, "the gateway to be ready")
        page = watched.page
        page.goto(gateway.url)
        field = page.get_by_role("textbox", name="API key")
        field.fill("wrong")
        field.press("Enter")
        expect(page.locator("#key-error")).to_contain_text("refused this key")
        field.fill(secret)
        field.press("Enter")
        console = Console(page, gateway.url)
        expect(page.locator("#p-model")).not_to_be_empty()
        assert console.ask("Hello!")
        stored = page.evaluate("[JSON.stringify(localStorage), document.cookie]")
        assert secret not in "".join(stored)
        assert page.evaluate("Object.values(sessionStorage)") == [secret]
        page.get_by_role("button", name="Forget key").click()
        assert page.evaluate("Object.values(sessionStorage)") == []
    watched.close()
    assert all("401" in fault for fault in watched.faults)


def test_the_page_loads_nothing_from_elsewhere(watched: WatchedPage, up: UpProcess) -> None:
    loaded: list[str] = []
    watched.page.on("request", lambda request: loaded.append(request.url))
    console = Console(watched.page, up.url)
    for view in VIEWS:
        console.open(view)
    assert loaded and all(url.startswith(up.url) for url in loaded)
    policy = httpx.get(up.url).headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
