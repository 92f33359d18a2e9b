"""The README's examples work: they run as printed against `headrace up`."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from headrace_common.text.checkpoint import demo_folder
from headrace_testing import readme
from headrace_testing.documents import blocks
from headrace_testing.headrace_up import HEADRACE, UpProcess
from headrace_testing.in_process import program
from headrace_testing.readme import block

ROOT = readme.ROOT
KEYS_FILE = "HEADRACE_GATEWAY_API_KEYS_FILE"


def run(*command: str, stdin: str = "") -> str:
    """The output of a command, which must succeed."""
    done = subprocess.run(
        command, input=stdin, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def printed_by(tmp_path: Path) -> Callable[[str], str]:
    """Runs an example in Python and returns what it prints."""

    def run_here(example: str) -> str:
        file = tmp_path / "example.py"
        file.write_text(example)
        return program(file)

    return run_here


def here(text: str, served: UpProcess) -> str:
    """The example, changed for a server that had to take another port."""
    return text.replace("127.0.0.1:8000", f"127.0.0.1:{served.port}")


def test_the_curl_example(served: UpProcess) -> None:
    answer = json.loads(run("bash", "-c", here(block("sh", "What is Headrace?"), served)))
    assert len(answer["choices"][0]["message"]["content"].split()) > 3


def test_the_resumed_stream_is_the_whole_answer(served: UpProcess) -> None:
    example = here(block("sh", "Last-Event-ID"), served)
    printed = run("bash", "-c", example)
    (body,) = re.findall(r"-d '(.*)'", example)
    request = {**json.loads(body), "stream": False}
    whole = httpx.post(f"{served.url}/v1/completions", json=request, timeout=60).json()

    assert printed.rstrip().endswith("data: [DONE]")
    chunks = [json.loads(line) for line in re.findall(r"^data: ({.*})$", printed, re.MULTILINE)]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


def test_the_sdk_example(served: UpProcess, printed_by: Callable[[str], str]) -> None:
    printed = printed_by(here(block("python", "import OpenAI"), served))
    assert len(printed.split()) > 10


def test_tools_reasoning_and_json_of_the_demo_model(
    served: UpProcess, printed_by: Callable[[str], str]
) -> None:
    begun = block("python", "import OpenAI").partition("stream = ")[0]
    printed = printed_by(here(f"{begun}{block('python', 'reasoning_effort')}", served))
    called, thought, filled = map(json.loads, printed.splitlines())

    (call,) = called["tool_calls"]
    assert call["function"]["name"] == "calculate"
    assert json.loads(call["function"]["arguments"]) == {"expression": "123 * 45"}
    assert thought["reasoning_content"] and thought["content"] == "47 + 38 = 85."
    assert json.loads(filled["content"]) == {"name": "Emma", "age": 31}


def test_the_example_for_users_of_openai(
    served: UpProcess, printed_by: Callable[[str], str]
) -> None:
    (example,) = [each for each in blocks() if each.page.name == "coming-from-openai.md"]
    assert printed_by(here(example.text, served)) == "headrace-demo\n"


def test_the_terminal_chat(served: UpProcess) -> None:
    command = block("sh", "headrace chat").strip().replace(".venv/bin/headrace", str(HEADRACE))
    printed = run("bash", "-c", f"{command} --url {served.url}/v1", stdin="Hello!\n")
    assert len(printed.split()) >= 3


def test_the_commands_that_load_and_watch(served: UpProcess) -> None:
    """The third command, the demo, has a test of its own."""
    lines = block("sh", "headrace bench").replace(".venv/bin/headrace", str(HEADRACE)).splitlines()
    load, watch, demo = (line for line in lines if line)
    assert "goodput" in run("bash", "-c", f"{load} --url {served.url}/v1")
    assert "engine-0" in run("bash", "-c", f"{watch} --url {served.url}/v1")
    assert demo == f"{HEADRACE} demo"


def test_the_api_keys_example(tmp_path: Path) -> None:
    """Runs the printed commands in a new folder; the gateways' file contains the printed key."""
    export, create, up = (line for line in block("sh", "keys create").splitlines())
    assert (export, up) == (f"export {KEYS_FILE}=keys.yaml", ".venv/bin/headrace up")
    create = create.replace(".venv/bin/headrace", str(HEADRACE))
    printed = run("bash", "-c", f"cd {tmp_path}\n{export}\n{create}").strip()
    with UpProcess(tmp_path, env={KEYS_FILE: str(tmp_path / "keys.yaml")}) as guarded:
        guarded.until_served()
        statuses = []
        for key in (printed, "hr-another"):
            headers = {"authorization": f"Bearer {key}"}
            statuses.append(httpx.get(f"{guarded.url}/v1/models", headers=headers).status_code)

    assert statuses == [200, 401]


def test_the_offline_example(printed_by: Callable[[str], str]) -> None:
    example = block("python", "import LLM").replace("Qwen/Qwen3-0.6B", str(demo_folder()))
    lines = printed_by(example).splitlines()
    assert [line.partition(" -> ")[0] for line in lines] == [
        "The capital of France is",
        "Water boils at",
    ]
    assert all(line.partition(" -> ")[2].strip() for line in lines)


@pytest.mark.parametrize("process", ["engine", "gateway"])
def test_processes_have_the_flags_that_the_readme_gives_them(process: str) -> None:
    (line,) = re.findall(
        rf"^headrace {process}  ?(--redis-url.*)$",
        block("sh", "headrace gateway --redis-url"),
        re.MULTILINE,
    )
    known = run(str(HEADRACE), process, "--help")
    flags = re.findall(r"--[a-z-]+", line)
    assert flags and all(re.search(rf"^ *{flag} ", known, re.MULTILINE) for flag in flags)
