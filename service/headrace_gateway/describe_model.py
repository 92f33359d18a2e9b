"""Prints as JSON how a gateway would serve a checkpoint, from its files:

    python -m headrace_gateway.describe_model FOLDER_OR_GGUF

`problem` is the reason why no gateway serves it, else null.
"""

import json
import sys
from dataclasses import asdict, dataclass

from headrace_common.errors import HeadraceError
from headrace_common.text.chat_template import find_chat_template
from headrace_common.text.checkpoint import CheckpointFiles, read_files
from headrace_common.text.tokenizer import Tokenizer

from .parsing.reasoning.catalog import detect_reasoning_parser
from .parsing.tool_calls.catalog import detect_tool_parser


@dataclass(frozen=True, slots=True)
class Description:
    """The number of tokens in the vocabulary, and the formats that the chat template shows (None if
    it shows none)."""

    vocab_size: int
    chat_template: bool
    tool_calls: str | None = None
    reasoning: str | None = None


def describe(files: CheckpointFiles) -> Description:
    """Raises TokenizerError or ChatTemplateError."""
    tokenizer = Tokenizer.from_files(files)
    template = find_chat_template(files, tokenizer)
    if template is None:
        return Description(tokenizer.vocab_size, chat_template=False)
    return Description(
        tokenizer.vocab_size,
        chat_template=True,
        tool_calls=detect_tool_parser(template.source),
        reasoning=detect_reasoning_parser(template.source),
    )


def main(folder: str) -> None:
    try:
        found = {**asdict(describe(read_files(folder))), "problem": None}
    except HeadraceError as error:
        found = {"problem": str(error)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
