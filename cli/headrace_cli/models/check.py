"""`headrace models check`: asks the engine's and the gateway's code about a checkpoint.

Each runs in a process of its own, as the command line imports neither. Weights are not read.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace_common.text.checkpoint import resolve
from headrace_common.text.errors import TokenizerError

from ..doctor.checks import hardware
from ..doctor.checks import model as files
from ..doctor.checks.finding import Finding, Level, fail, ok, warning
from ..tables import Output, plain_table, without_controls
from .pull import bars_on_a_terminal_alone, hub_bytes

_SECONDS = 300


def run_check(model: str, ranks: int, output: Output) -> bool:
    """Shows the findings; returns whether the model can be served."""
    bars_on_a_terminal_alone()
    found = list(_findings(model, ranks))
    table = plain_table("", "check", "found", "remedy")
    for each in found:
        table.add_row(each.level.value, each.subject, *map(_line, (each.detail, each.remedy)))
    data = [each.data for each in found]
    healthy = all(each.level is not Level.FAIL for each in found)
    output.show({"model": model, "servable": healthy, "findings": data}, table)
    return healthy


def _line(text: str) -> str:
    return without_controls(" ".join(text.split()))


def _findings(model: str, ranks: int) -> Iterator[Finding]:
    checked = list(files.check(model))
    yield from checked
    if any(each.level is Level.FAIL for each in checked):
        return
    try:
        folder = resolve(model)  # the small files, for a hub id that is not cached
    except TokenizerError as error:
        yield fail("model", str(error), "check the id, your network and HF_TOKEN")
        return
    engine = _ask("headrace_engine.model_loader.describe_model", folder, str(ranks))
    weights = files.weight_bytes(model) or hub_bytes(model)
    yield from _engine(engine, weights)
    yield from _gateway(_ask("headrace_gateway.describe_model", folder))
    yield from hardware.memory(weights)


def _engine(found: dict[str, Any], weights: int | None) -> Iterator[Finding]:
    if found["problem"] is not None:
        yield fail("engine", found["problem"], "take another checkpoint of this model")
        return
    name, kind = found["architecture"], found["implementation"]
    where = f"{found['dtype']} on {found['device']}"
    if kind == "native":
        yield ok("engine", f"{name}: native, {where}")
    elif kind == "encoder":
        yield ok("engine", f"{name}: an encoder, for embeddings, {where}")
    else:
        why = f" ({found['note']})" if found["note"] else ""
        yield warning(
            "engine",
            f"{name}: not native, through transformers{why}, {where}",
            "it is slower, and refused at the start if its attention is of another kind",
        )
    yield ok("quantisation", found["quantization"] or "none")
    if found["max_model_len"] is not None:
        yield ok("context", f"{found['max_model_len']} tokens")
    if found["tensors"] is not None:
        yield ok("tensors", f"{found['tensors']}, each with its place in the model")
    yield from _memory(found, weights)


def _memory(found: dict[str, Any], weights: int | None) -> Iterator[Finding]:
    parts = [] if weights is None else [f"weights {_size(weights)}"]
    if (token := found["kv_bytes_per_token"]) is not None:
        whole = token * found["max_model_len"]
        parts.append(f"KV {_size(token)} a token, {_size(whole)} for a whole context")
    if state := found["state_bytes_per_sequence"]:
        parts.append(f"recurrent state {_size(state)} a sequence")
    if parts:
        yield ok("size", "; ".join(parts))


def _gateway(found: dict[str, Any]) -> Iterator[Finding]:
    if found["problem"] is not None:
        yield fail("tokenizer", found["problem"], "take another checkpoint of this model")
        return
    yield ok("tokenizer", f"{found['vocab_size']} tokens")
    if not found["chat_template"]:
        yield warning(
            "chat template", "none: chats are refused", "give one with --chat-template, or use "
            "/v1/completions",
        )  # fmt: skip
        return
    yield ok("chat template", "found")
    yield ok("tool calls", found["tool_calls"] or "no known format: tools are refused")
    yield ok("reasoning", found["reasoning"] or "none")


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _ask(module: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """The JSON that a module prints about a folder; `problem` is one of its keys."""
    command = [sys.executable, "-m", module, str(folder), *arguments]
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"no answer in {_SECONDS} s"}
    if done.returncode != 0:
        return {"problem": (done.stderr.strip().splitlines() or ["it crashed"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
