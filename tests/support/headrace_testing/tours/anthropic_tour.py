"""The anthropic SDK: a message, a stream, a tool, counting tokens."""

import sys
from typing import Any

from anthropic import Anthropic

from .shared import CHAT, HELLO, MAX_TOKENS, SCHEMA, check_place


def main(url: str) -> None:
    arguments: Any = {
        "model": CHAT,
        "max_tokens": MAX_TOKENS,
        "extra_body": {"temperature": 0},
        "system": "Be brief.",
        "messages": [{"role": "user", "content": HELLO}],
    }
    with Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        whole = client.messages.create(**arguments)
        with client.messages.stream(**arguments) as stream:
            text = "".join(stream.text_stream)
        block: Any = whole.content[0]
        assert text and block.text == text
        tool: Any = {"name": "travel", "input_schema": SCHEMA}
        forced = client.messages.create(
            **{**arguments, "max_tokens": 200},
            tools=[tool],
            tool_choice={"type": "tool", "name": "travel"},
        )
        (use,) = [block for block in forced.content if block.type == "tool_use"]
        check_place(use.input)
        counted = client.messages.count_tokens(
            model=CHAT, system=arguments["system"], messages=arguments["messages"]
        )
        assert counted.input_tokens == whole.usage.input_tokens


if __name__ == "__main__":
    main(sys.argv[1])
