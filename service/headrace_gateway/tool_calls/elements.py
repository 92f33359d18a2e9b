"""Forms that write each argument as an element of its own, its text as it is.

`<function=f><parameter=a>text</parameter></function>` and its like: Qwen3-Coder's, GLM's, MiniMax'
and Seed's. Which values are texts is said by the functions' schemas.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

QWEN3_CODER, QWEN3_XML, SEED_OSS = "qwen3_coder", "qwen3_xml", "seed_oss"
GLM45, GLM47, MINIMAX_M2 = "glm45", "glm47", "minimax_m2"
_NAME = r"([\w.:/-]{1,128})"


@dataclass(frozen=True, slots=True)
class Elements:
    """How calls are read, and how they are written.

    Read: behind `opening` a call begins as `head` says, whose last character is `head_end` (kept
    for what follows where it is the beginning of a marker), and ends with one of `ends`; a
    parameter begins with `key_opening` and as `key` says. `pad`: a line break on each side of a
    value. `several`: a block may hold several calls. `only_known`: other names are no calls. `bare`
    begins a call whose opening the model has forgotten.

    Written: `begin`, for each parameter `parameter`, the value, `value_end` and `after`, at last
    `end`; `block` behind the opening, where it holds several calls.
    """

    opening: str
    closing: str
    head: re.Pattern[str]
    head_end: str
    key_opening: str
    key: re.Pattern[str]
    value_end: str
    ends: tuple[str, ...]
    begin: str
    parameter: str
    after: str
    end: str
    pad: str = ""
    several: bool = False
    only_known: bool = False
    bare: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing, self.key_opening, self.value_end)


def _functions(opening: str, closing: str, pad: str) -> Elements:
    return Elements(
        opening,
        closing,
        head=re.compile(rf"\s*<function={_NAME}>", re.ASCII),
        head_end=">",
        key_opening="<parameter=",
        key=re.compile(r"<parameter=([^>\n]{1,256})>"),
        value_end="</parameter>",
        ends=("</function>",),
        begin="\n<function={name}>\n",
        parameter=f"<parameter={{name}}>{pad}",
        after="\n",
        end="</function>\n",
        pad=pad,
        bare="<function=",
    )


def _glm(blank: str) -> Elements:
    return Elements(
        "<tool_call>",
        "</tool_call>",
        head=re.compile(rf"\s*{_NAME}\s*<", re.ASCII),
        head_end="<",
        key_opening="<arg_key>",
        key=re.compile(r"<arg_key>([^<\n]{1,256})</arg_key>\s{0,64}<arg_value>"),
        value_end="</arg_value>",
        ends=(),
        begin=f"{{name}}{blank}",
        parameter=f"<arg_key>{{name}}</arg_key>{blank}<arg_value>",
        after=blank,
        end="",
        only_known=True,
    )


_MINIMAX = Elements(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    head=re.compile(rf'\s*<invoke\s+name="{_NAME}"\s*>', re.ASCII),
    head_end=">",
    key_opening="<parameter name=",
    key=re.compile(r'<parameter name="([^">\n]{1,256})">'),
    value_end="</parameter>",
    ends=("</invoke>",),
    begin='<invoke name="{name}">\n',
    parameter='<parameter name="{name}">',
    after="\n",
    end="</invoke>\n",
    several=True,
)

ELEMENTS: Mapping[str, Elements] = {
    QWEN3_CODER: _functions("<tool_call>", "</tool_call>", "\n"),
    QWEN3_XML: _functions("<tool_call>", "</tool_call>", "\n"),
    SEED_OSS: _functions("<seed:tool_call>", "</seed:tool_call>", ""),
    GLM45: _glm("\n"),
    GLM47: _glm(""),
    MINIMAX_M2: _MINIMAX,
}
