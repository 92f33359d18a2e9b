"""Formats that write each argument as its own element, with texts unquoted.

`<function=f><parameter=a>text</parameter></function>` and similar: Qwen3-Coder's, GLM's, MiniMax',
Seed's and DeepSeek's. The functions' schemas, or a mark at each value, say which values are texts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

QWEN3_CODER, QWEN3_XML, SEED_OSS, MIMO = "qwen3_coder", "qwen3_xml", "seed_oss", "mimo"
GLM45, GLM47, MINIMAX_M2 = "glm45", "glm47", "minimax_m2"
DEEPSEEK_V32, DEEPSEEK_V4, DSML = "deepseek_v32", "deepseek_v4", "｜DSML｜"
_NAME = r"([\w.:/-]{1,128})"


@dataclass(frozen=True, slots=True)
class Elements:
    """The syntax of calls, for reading and for writing them.

    Read: after `opening` a call begins as `head` says. The last character of that is `head_end`
    (kept for what follows if it begins a marker). A call ends with one of `ends`; a parameter
    begins with `key_opening` and as `key` says. `pad`: a line break on each side of a value.
    `several`: a block may hold several calls. `only_known`: other names are not calls. `bare`
    begins a call whose opening the model has forgotten. `key` may have a group `string`: whether
    the value is a text.

    Written: `begin`, for each parameter `parameter` (`{string}` in it is `true` or `false`), the
    value, `value_end` and `after`, finally `end`.
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
    def says_texts(self) -> bool:
        """Whether each value is marked as a text or not."""
        return "{string}" in self.parameter

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


def _invokes(block: str, prefix: str = "", read: str = "", written: str = "") -> Elements:
    """Returns a format in which `read` may follow the names of parameters, and `written` does."""
    return Elements(
        f"<{block}>",
        f"</{block}>",
        head=re.compile(rf'\s*<{prefix}invoke\s+name="{_NAME}"\s*>', re.ASCII),
        head_end=">",
        key_opening=f"<{prefix}parameter name=",
        key=re.compile(rf'<{prefix}parameter name="([^">\n]{{1,256}})"{read}>'),
        value_end=f"</{prefix}parameter>",
        ends=(f"</{prefix}invoke>",),
        begin=f'<{prefix}invoke name="{{name}}">\n',
        parameter=f'<{prefix}parameter name="{{name}}"{written}>',
        after="\n",
        end=f"</{prefix}invoke>\n",
        several=True,
    )


def _dsml(block: str) -> Elements:
    read = '(?: string="(?P<string>true|false)")?'
    return _invokes(f"{DSML}{block}", DSML, read, ' string="{string}"')


ELEMENTS: Mapping[str, Elements] = {
    QWEN3_CODER: _functions("<tool_call>", "</tool_call>", "\n"),
    QWEN3_XML: _functions("<tool_call>", "</tool_call>", "\n"),
    MIMO: _functions("<tool_call>", "</tool_call>", "\n"),
    SEED_OSS: _functions("<seed:tool_call>", "</seed:tool_call>", ""),
    GLM45: _glm("\n"),
    GLM47: _glm(""),
    MINIMAX_M2: _invokes("minimax:tool_call"),
    DEEPSEEK_V32: _dsml("function_calls"),
    DEEPSEEK_V4: _dsml("tool_calls"),
}
