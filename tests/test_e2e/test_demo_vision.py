"""The vision demo model, which `headrace up` serves, reads pictures that it was not trained on:
through the API and, in a real browser, in the console's chat."""

import base64
import io
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from openai import OpenAI
from playwright.sync_api import Browser, BrowserContext, Page, Request, expect

from drawings import Group, Picture, draw_number, draw_shapes
from headrace_common.text.checkpoint import DEMO_VISION
from headrace_testing.browser import WatchedPage, chromium, kept_context
from headrace_testing.console import Console
from headrace_testing.headrace_up import UpProcess
from headrace_testing.readme import ROOT, block

SCENE = (Group(3, "red", "circle"), Group(1, "blue", "square"))
# Puts files where a person pastes or drops them. Arguments: the event, and names, types and data.
TRANSFER = """(element, [kind, files]) => {
    const data = new DataTransfer();
    for (const [name, type, text] of files) {
        const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
        data.items.add(new File([bytes], name, { type }));
    }
    const event = kind === "paste"
        ? new ClipboardEvent(kind, { clipboardData: data, bubbles: true, cancelable: true })
        : new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
    element.dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    with UpProcess(tmp_path_factory.mktemp("up"), "--model", DEMO_VISION) as up:
        up.until_served(DEMO_VISION)
        yield up


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


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
    assert watched.faults == []


@pytest.fixture
def console(watched: WatchedPage, up: UpProcess) -> Console:
    console = Console(watched.page, up.url, DEMO_VISION)
    console.open()
    console.set(temperature=0)
    return console


@pytest.fixture(scope="module")
def scene() -> Picture:
    """Three red circles and a blue square."""
    return draw_shapes(random.Random("a scene of the tests"), SCENE)


@pytest.fixture(scope="module")
def number() -> Picture:
    return draw_number(random.Random("a number of the tests"), "47")


def png(picture: Picture) -> bytes:
    file = io.BytesIO()
    picture.image.save(file, "PNG")
    return file.getvalue()


def file(picture: Picture, name: str = "scene.png") -> Any:
    return {"name": name, "mimeType": "image/png", "buffer": png(picture)}


def transfer(page: Page, place: str, kind: str, *files: Any) -> None:
    """Pastes or drops these files."""
    given = [
        [each["name"], each["mimeType"], base64.b64encode(each["buffer"]).decode()]
        for each in files
    ]
    page.locator(place).evaluate(TRANSFER, [kind, given])


# The model


def test_a_picture_is_described(up: UpProcess, scene: Picture, number: Picture) -> None:
    with OpenAI(base_url=f"{up.url}/v1", api_key="none") as client:
        for picture in (scene, number):
            data = base64.b64encode(png(picture)).decode()
            image: Any = {
                "type": "image_url",
                "image_url": {"url": f"data:image/png;base64,{data}"},
            }
            asked: Any = {"type": "text", "text": "What do you see?"}
            answer = client.chat.completions.create(
                model=DEMO_VISION,
                messages=[{"role": "user", "content": [image, asked]}],
                temperature=0,
            )
            assert answer.choices[0].message.content == f"I see {picture}."


def test_a_picture_is_read_in_the_console(
    console: Console, scene: Picture, number: Picture
) -> None:
    for picture in (scene, number):
        attach(console, file(picture))
        assert console.ask("What do you see?") == f"I see {picture}."


def test_the_commands_of_the_readme(up: UpProcess, tmp_path: Path) -> None:
    serve, draw = block("sh", "demo/drawings.py").splitlines()
    assert serve == f".venv/bin/headrace up --model {DEMO_VISION}"
    _, program, *words = draw.partition("#")[0].split()
    drawn = run(tmp_path, str(ROOT / program), *words)
    client = block("python", "import OpenAI").partition("stream = ")[0]
    asks = f"{client}{block('python', 'shapes.png')}".replace(":8000", f":{up.port}")
    assert run(tmp_path, "-c", asks) == f"I see {drawn}."


def run(folder: Path, *words: str) -> str:
    """What Python prints."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# The console


def test_a_picture_is_attached_and_sent_with_each_message(
    console: Console, scene: Picture, number: Picture
) -> None:
    page = console.page
    expect(page.locator("#picture-limits")).to_contain_text("PNG, JPEG, WebP or GIF, up to 64")
    with page.expect_file_chooser() as chosen:
        page.get_by_role("button", name="Add picture").click()
    chosen.value.set_files(file(scene))
    expect(page.locator("#pictures img")).to_have_attribute("alt", "scene.png")
    assert console.focused() == "message"
    with page.expect_request("**/v1/chat/completions") as sent:
        console.ask("What do you see?")
    content = json.loads(sent.value.post_data or "")["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "text"]
    assert pictures_of(sent.value) == [png(scene)]
    expect(page.locator("#pictures")).to_be_hidden()
    expect(page.locator(".turn.user").get_by_role("img", name="scene.png")).to_be_visible()

    attach(console, file(number, "number.png"))
    with page.expect_request("**/v1/chat/completions") as sent:
        page.press("#message", "Enter")  # a picture without a text
    console.until_answered()
    assert pictures_of(sent.value) == [png(scene), png(number)]


def pictures_of(request: Request) -> list[bytes]:
    """The pictures in a request for a chat."""
    urls = re.findall(r"data:image/png;base64,([^\"]+)", request.post_data or "")
    return [base64.b64decode(url) for url in urls]


def attach(console: Console, given: Any) -> None:
    console.page.set_input_files("#picture-file", given)
    expect(console.page.locator("#pictures img")).to_have_count(1)


def test_pictures_are_pasted_and_dropped(console: Console, scene: Picture) -> None:
    page = console.page
    transfer(page, "#message", "paste", file(scene, "image.png"))
    expect(page.locator("#pictures img")).to_have_count(1)
    transfer(page, "#conversation", "dragover", file(scene))
    expect(page.locator("#view-chat")).to_have_class("view chat dropping")
    transfer(page, "#conversation", "drop", file(scene, "one.png"), file(scene, "two.png"))
    expect(page.locator("#pictures img")).to_have_count(3)
    expect(page.locator("#view-chat")).to_have_class("view chat")
    expect(page.locator("#announcer")).to_have_text("two.png is added: 3 pictures to send.")


def test_a_picture_is_removed_with_the_keyboard(console: Console, scene: Picture) -> None:
    page = console.page
    page.set_input_files("#picture-file", [file(scene, "one.png"), file(scene, "two.png")])
    expect(page.locator("#pictures img")).to_have_count(2)
    remove = page.get_by_role("button", name="Remove one.png")
    remove.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#pictures img")).to_have_count(1)
    expect(page.get_by_role("button", name="Remove two.png")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#pictures")).to_be_hidden()
    expect(page.get_by_role("button", name="Add picture")).to_be_focused()
    expect(page.locator("#announcer")).to_have_text("two.png is removed.")


@pytest.mark.parametrize(
    ("name", "kind", "content", "fault"),
    [
        ("notes.txt", "text/plain", b"words", "it is no picture in PNG, JPEG, WebP or GIF."),
        ("broken.png", "image/png", b"words", "it is damaged."),
        ("large.png", "image/png", bytes(8 * 2**20 + 1), "it has over 8 MiB."),
        ("long.png", "image/png", bytes(7 * 2**20), "have at most 6 MiB together."),
    ],
)
def test_what_the_server_would_refuse_is_not_added(
    console: Console, name: str, kind: str, content: bytes, fault: str
) -> None:
    given: Any = {"name": name, "mimeType": kind, "buffer": content}
    console.page.set_input_files("#picture-file", given)
    refusal = console.page.get_by_role("alert").filter(has_text=name)
    expect(refusal).to_contain_text(fault)
    expect(console.page.locator("#pictures")).to_be_hidden()


def test_an_edited_message_keeps_its_picture(console: Console, scene: Picture) -> None:
    page = console.page
    attach(console, file(scene))
    console.ask("What do you see?")
    page.get_by_role("button", name="Edit").click()
    editor = page.get_by_label("Your message")
    editor.fill("What colour is the square?")
    with page.expect_request("**/v1/chat/completions") as sent:
        editor.press("Enter")
    console.until_answered()
    assert pictures_of(sent.value) == [png(scene)]
    expect(page.locator(".turn.user img")).to_have_count(1)


def test_the_copied_code_has_a_placeholder_for_the_picture(
    console: Console, scene: Picture
) -> None:
    page = console.page
    attach(console, file(scene))
    page.fill("#message", "What do you see?")
    page.get_by_role("button", name="Copy as code").click()
    code = page.locator("#code-text")
    placeholder = "data:image/png;base64,<picture 1 in base64>"
    assert f'"url": "{placeholder}"' in code.input_value()
    page.get_by_label("Python").check()
    assert f'"url": "{placeholder}"' in code.input_value()
    compile(code.input_value(), "copied", "exec")


def test_axe_finds_no_violation(console: Console, scene: Picture) -> None:
    page = console.page
    attach(console, file(scene))
    console.ask("What do you see?")
    attach(console, file(scene))
    page.set_input_files("#picture-file", file(scene) | {"mimeType": "text/plain"})
    expect(page.locator("#picture-error")).not_to_be_empty()
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        expect(page.locator("html")).to_have_attribute("data-theme", scheme)
        found = Axe().run(page)
        assert found.violations_count == 0, f"{scheme}: {found.generate_report()}"
