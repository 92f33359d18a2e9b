"""Writes docs/settings.md, the page of every process's settings, from their classes.

A test compares the page with the one made here; `make generated` renews it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from headrace_engine.serving.settings import EngineSettings
from headrace_gateway.settings import GatewaySettings
from headrace_operator.settings import OperatorSettings

PAGE = Path(__file__).resolve().parents[4] / "docs" / "settings.md"
PROCESSES: Mapping[str, type[BaseSettings]] = {
    "Gateway": GatewaySettings,
    "Engine": EngineSettings,
    "Operator": OperatorSettings,
}
INTRODUCTION = """\
# Settings

Each process reads its settings once, from flags and from the environment; flags win. The gateway's
`max_connections` is `--max-connections` or `HEADRACE_GATEWAY_MAX_CONNECTIONS`. A process with an
invalid value does not start, and names it. It logs variables with its prefix that are not settings.
Lists and objects are JSON.

`make generated` writes this page from the settings' classes.
"""


def page() -> str:
    return "\n".join([INTRODUCTION, *(_section(*each) for each in PROCESSES.items())])


def _section(title: str, settings: type[BaseSettings]) -> str:
    return "\n".join(
        [
            f"## {title}",
            "",
            f"In the environment `{settings.model_config['env_prefix']}*`.",
            "",
            "| setting | default | effect |",
            "| --- | --- | --- |",
            *_rows(settings.model_fields),
            "",
        ]
    )


def _rows(fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    for name, field in fields.items():
        effect = f"{field.description}{_choices(field.annotation)}".replace("|", "\\|")
        yield f"| `{name}` | {_default(field)} | {effect} |"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "must be given"
    if value is None or value in ("", (), {}):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, ByteSize):
        return f"`{value.human_readable().replace('.0', '')}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _choices(annotation: Any) -> str:
    """The values of a setting of type Literal."""
    if get_origin(annotation) is not Literal:
        return ""
    return f" ({', '.join(f'`{value}`' for value in get_args(annotation))})"


if __name__ == "__main__":
    PAGE.write_text(page())
