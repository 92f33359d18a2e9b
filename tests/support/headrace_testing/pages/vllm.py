"""Writes docs/coming-from-vllm.md, the page for users of vLLM, from the table of its flags.

A test compares the page with the one made here; `make generated` renews it.
"""

from collections.abc import Iterator
from pathlib import Path

from headrace_cli.flags.flag import option
from headrace_cli.flags.vllm import FLAGS, Absent, Entry, Needless, Renamed, Same
from headrace_common.observability import metric_names
from headrace_gateway.schemas.completions import UNSUPPORTED

PAGE = Path(__file__).resolve().parents[4] / "docs" / "coming-from-vllm.md"
INTRODUCTION = """\
# Coming from vLLM

    vllm serve Qwen/Qwen3-0.6B --dtype half --max-model-len 4k
    headrace serve Qwen/Qwen3-0.6B --dtype half --max-model-len 4k

`headrace serve MODEL` is `headrace up --model MODEL`: queue, engines and gateways on this machine.
`up`, `serve`, `engine` and `gateway` take vLLM's flags, as far as the tables below say, and
`--config FILE` with vLLM's YAML. Flags of the command line win over the file. A short number such
as `4k` (4000) or `4K` (4096) is read as in vLLM. Further names after `--served-model-name` become
aliases. All flags are checked before a process starts.

`make generated` writes this page from the tables in the code.
"""
_REST = """\
## Requests

The API is [OpenAI's with vLLM's fields](api.md). These fields of vLLM and OpenAI are refused by
name, except for values that change nothing:

{fields}

## Metrics

Engines export these names of vLLM:

{metrics}

[Operations](operations.md#dashboards-and-autoscalers-for-vllm) has the names that replace the
others.

## Scripts

`from headrace_engine import LLM, SamplingParams` replaces `from vllm import ...`. An argument that
`LLM` does not have is refused by name.
"""


def page() -> str:
    fields = [f"| `{name}` | {remedy} |" for name, (_, remedy) in sorted(UNSUPPORTED.items())]
    metrics = [f"- `{name}`" for name in _metrics()]
    rest = _REST.format(
        fields="\n".join(["| field | instead |", "| --- | --- |", *fields]),
        metrics="\n".join(metrics),
    )
    return "\n".join([INTRODUCTION, *_flags(), rest])


def _flags() -> Iterator[str]:
    same = [name for name, entry in FLAGS.items() if isinstance(entry, Same)]
    yield "## Flags\n\nThe same: " + ", ".join(f"`{option(name)}`" for name in same) + ".\n"
    yield _values()
    for title, kind, head in (
        ("Other names", Renamed, "Headrace"),
        ("Not needed", Needless, "why"),
        ("Not there", Absent, "instead"),
    ):
        rows = [
            f"| `{_written(name)}` | {_effect(entry)} |"
            for name, entry in FLAGS.items()
            if isinstance(entry, kind)
        ]
        yield "\n".join([f"### {title}", "", f"| vLLM | {head} |", "| --- | --- |", *rows, ""])


def _values() -> str:
    rows = [
        f"| `{option(name)} {value}` | `{ours}` |"
        for name, entry in FLAGS.items()
        if isinstance(entry, Same)
        for value, ours in entry.values.items()
    ]
    return "\n".join(["| value of vLLM | Headrace's |", "| --- | --- |", *rows, ""])


def _written(name: str) -> str:
    return option(name) if len(name) > 2 else f"-{name}"


def _effect(entry: Entry) -> str:
    match entry:
        case Renamed():
            values = ", ".join(f"`{value}` is `{ours}`" for value, ours in entry.values.items())
            return "; ".join(filter(None, [f"`{option(entry.to)}`", values, entry.difference]))
        case Needless():
            only = ", ".join(f"`{value}`" for value in entry.values)
            return entry.why + (f"; other values than {only} are refused" if only else "")
        case Absent():
            return entry.remedy
        case Same():
            return ""


def _metrics() -> list[str]:
    names = (value for name, value in vars(metric_names).items() if name.startswith("VLLM_"))
    return sorted(name for name in names if isinstance(name, str))


if __name__ == "__main__":
    PAGE.write_text(page())
