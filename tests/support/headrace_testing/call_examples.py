"""One answer with two calls in each format that is parsed: weather of Rome in 2 days, and now."""

from collections.abc import Mapping

_WEATHER, _NOW = '{"city": "Rome", "days": 2}', "{}"
_FUNCTION = (
    "<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n"
)
_ARRAY = f'[{{"name": "weather", "arguments": {_WEATHER}}}, {{"name": "now", "arguments": {{}}}}]'
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call><tool_call>now\n</tool_call>"
)
_HERMES = (
    f'<tool_call>\n{{"name": "weather", "arguments": {_WEATHER}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
_QWEN3 = (
    f"<tool_call>\n{_FUNCTION}</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
)


def _deepseek(name: str, arguments: str, *, fenced: bool) -> str:
    inner = f"{name}<｜tool▁sep｜>{arguments}"
    if fenced:
        inner = f"function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
    return f"<｜tool▁call▁begin｜>{inner}<｜tool▁call▁end｜>"


def _kimi(number: int, name: str, arguments: str) -> str:
    return (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>"
    )


def _dsml(block: str) -> str:
    inner = (
        '<invoke name="weather">\n<parameter name="city" string="true">Rome</parameter>\n'
        '<parameter name="days" string="false">2</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n'
    )
    text = f"<{block}>\n{inner}</{block}>"
    return text.replace("</", "</｜DSML｜").replace("<", "<｜DSML｜").replace("<｜DSML｜/", "</")


def _harmony(name: str, arguments: str, end: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}{end}"


# Examples by parser; in those of MARKED a text may come before the calls.
EXAMPLES: Mapping[str, str] = {
    "deepseek_v3": _DEEPSEEK[0]
    + _deepseek("weather", _WEATHER, fenced=True)
    + "\n"
    + _deepseek("now", _NOW, fenced=True)
    + _DEEPSEEK[1],
    "deepseek_v31": _DEEPSEEK[0]
    + _deepseek("weather", _WEATHER, fenced=False)
    + _deepseek("now", _NOW, fenced=False)
    + _DEEPSEEK[1],
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "gemma4": '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>",
    "glm45": _GLM,
    "glm47": _GLM.replace("\n", ""),
    "granite": f"<|tool_call|>{_ARRAY}",
    "granite4": _HERMES,
    "hermes": _HERMES,
    "hunyuan_a13b": f"<tool_calls>{_ARRAY}</tool_calls>",
    "jamba": f"<tool_calls>{_ARRAY}</tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|>"
    + _kimi(0, "weather", _WEATHER)
    + _kimi(1, "now", _NOW)
    + "<|tool_calls_section_end|>",
    "lfm2": '<|tool_call_start|>[weather(city="Rome", days=2), now()]<|tool_call_end|>',
    "llama3_json": f'{{"name": "weather", "parameters": {_WEATHER}}}; '
    '{"name": "now", "parameters": {}}',
    "llama4_pythonic": '[weather(city="Rome", days=2), now()]',
    "mimo": _QWEN3,
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome'
    '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n'
    '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{_WEATHER}[TOOL_CALLS]now[ARGS]{{}}",
    "nemotron_json": f"<TOOLCALL>{_ARRAY}</TOOLCALL>",
    "olmo3": '<function_calls>\nweather(city="Rome", days=2)\nnow()\n</function_calls>',
    "openai": _harmony("weather", _WEATHER, "<|end|><|start|>assistant")
    + _harmony("now", _NOW, "<|call|>"),
    "phi4_mini_json": f"functools{_ARRAY}",
    "pythonic": '[weather(city="Rome", days=2), now()]',
    "qwen3_coder": _QWEN3,
    "qwen3_xml": _QWEN3,
    "seed_oss": _QWEN3.replace("tool_call>", "seed:tool_call>").replace("\nRome\n", "Rome"),
}
MARKED = EXAMPLES.keys() - {"llama3_json", "openai", "pythonic", "llama4_pythonic"}
