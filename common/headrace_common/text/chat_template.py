"""Renders chat messages to prompt text with a checkpoint's own Jinja template.

The environment is that of transformers (sandboxed, loop controls, tojson, raise_exception,
strftime_now, generation blocks ignored), with bounds on time and size: a template comes with the
model, but the data that it loops over comes from users.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import HeadraceError
from .bounded_templates import is_bounded
from .checkpoint import CHAT_TEMPLATE_FILE, CheckpointFiles, read_files
from .errors import TokenizerError
from .tokenizer import Tokenizer

MAX_RENDERED_CHARS = 16 * 2**20
MAX_RENDER_SECONDS = 5.0
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

_LOOP_FILTER = "headrace_loop"
_SIZE_FILTER = "headrace_sized"

Message = Mapping[str, Any]


class ChatTemplateError(HeadraceError):
    """The template is missing, is broken, or rejects these messages; the message says why."""

    code = "chat_template_error"


class ChatTemplate:
    """A compiled template. Immutable, and safe to use from several threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        max_seconds: float = MAX_RENDER_SECONDS,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        """Compiles the source. Raises ChatTemplateError if it is not a template."""
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self._max_seconds = max_seconds
        self._max_chars = max_chars
        self._environment = _Environment(max_chars)
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"chat template, line {error.lineno}: {error}") from error

    @cached_property
    def bounded(self) -> bool:
        """Whether rendering keeps its limits for any messages (`bounded_templates`)."""
        parsed = self._environment.parse(self.source)
        return is_bounded(parsed, frozenset((_LOOP_FILTER, _SIZE_FILTER)))

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads and that a caller may pass."""
        parsed = self._environment.parse(self.source)
        return frozenset(jinja2.meta.find_undeclared_variables(parsed))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. `variables` are the template's own (chat_template_kwargs).

        Raises ChatTemplateError if the template refuses the messages, takes too long, or produces
        too much text.
        """
        chat = [_aliased(message) for message in messages]
        final = _tag_final(chat, self.source) if continue_final_message else None
        context = {
            **self.special_tokens,
            **(variables or {}),
            "messages": chat,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(context)
        return text if final is None else _cut_at_tag(text, final)

    def _run(self, context: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        try:
            with self._environment.deadline(self._max_seconds):
                for piece in self._template.generate(context):
                    self._environment.check()
                    size += len(piece)
                    if size > self._max_chars:
                        raise ChatTemplateError(
                            f"chat template: the prompt is over {self._max_chars} characters"
                        )
                    pieces.append(piece)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"chat template: {error.message or error}") from error
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
            MemoryError,
        ) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ChatTemplateError(f"chat template: {reason}") from error
        return "".join(pieces)


def load_chat_template(
    source: str | Path, tokenizer: Tokenizer, *, revision: str | None = None
) -> ChatTemplate | None:
    """The chat template of a folder or a hub id; see find_chat_template."""
    return find_chat_template(read_files(source, revision), tokenizer)


def find_chat_template(files: CheckpointFiles, tokenizer: Tokenizer) -> ChatTemplate | None:
    """A checkpoint's chat template; None if it has none.

    chat_template.jinja has precedence over tokenizer_config.json, as in transformers. Of several
    named templates "default" is used. Raises ChatTemplateError or TokenizerError.
    """
    text = _find_source(files)
    return None if text is None else ChatTemplate(text, tokenizer.special_tokens)


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    add_special_tokens: bool = False,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    most: int | None = None,
    show: Callable[[Any], Any] | None = None,
    rewrite: Callable[[str], str] | None = None,
) -> list[int]:
    """Messages to prompt token ids: only the template's own special tokens are special.

    `most` is the same as in Tokenizer.encode. `show` changes the messages that the template gets,
    and may add special tokens; `rewrite` changes the text before it is tokenised.
    """
    shown = tokenizer.protect(messages)
    text = template.render(
        shown if show is None else show(shown),
        tools=tokenizer.protect(tools),
        documents=tokenizer.protect(documents),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=tokenizer.protect(dict(variables or {})),
    )
    if rewrite is not None:
        text = rewrite(text)
    return tokenizer.encode_protected(text, add_special_tokens=add_special_tokens, most=most)


def _find_source(files: CheckpointFiles) -> str | None:
    text = files.text(CHAT_TEMPLATE_FILE)
    if text is not None:
        return text
    value = files.json("tokenizer_config.json").get("chat_template")
    if value is None:
        value = files.json("chat_template.json").get("chat_template")
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        kind = type(value).__name__
        raise TokenizerError(f"{files.origin}: chat_template must be text, not {kind}")
    return value


class _TooSlow(jinja2.TemplateRuntimeError):
    pass


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment, which stops at the deadline of this thread's render.

    Jinja has no unbounded loop, so it is enough to check the clock at the beginning of a loop and
    at every attribute, item and call. The sandbox routes all of these through the environment.

    Compiling a template computes nothing, since no bound would hold: Jinja then leaves out
    intercepted operators, and filters in a volatile context.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, max_chars: int) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        self._running = threading.local()
        self._max_chars = max_chars
        self.filters["tojson"] = _tojson
        self.filters[_LOOP_FILTER] = self._loop
        self.filters[_SIZE_FILTER] = self._sized
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]  # makes texts of any length without checking the deadline

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        self._running.until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._running.until = math.inf

    def check(self) -> None:
        if time.monotonic() > getattr(self._running, "until", math.inf):
            raise _TooSlow("rendering took too long")

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check()
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            left, right = self._sized(left), self._sized(right)
        elif operator in ("*", "**"):
            sizes = [x if isinstance(x, int) else len(x) for x in (left, right) if _has_size(x)]
            if len(sizes) == 2 and _magnitude(operator, *sizes) > self._max_chars:
                raise jinja2.exceptions.SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def _loop(self, iterable: Any) -> Any:
        self.check()
        return iterable

    def _sized(self, value: Any) -> Any:
        """Checks the size of an operand of a concatenation, which a loop could keep doubling."""
        if isinstance(value, str | list | tuple) and len(value) > self._max_chars:
            raise jinja2.exceptions.SecurityError("it makes a text or list that is too large")
        return value

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, _LOOP_FILTER)
        for concat in template.find_all(nodes.Concat):
            concat.nodes = [_filtered(node, _SIZE_FILTER) for node in concat.nodes]
        volatile = nodes.Keyword("volatile", nodes.Const(True))
        template.body.insert(0, nodes.EvalContextModifier([volatile], lineno=1))
        return template


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _has_size(value: object) -> bool:
    return isinstance(value, int | str | list | tuple)


def _magnitude(operator: str, left: int, right: int) -> int:
    """The size of an operand of a product or a power: a number's value, a text's length."""
    if operator == "*":
        return abs(left) * abs(right)
    return 1 << min(abs(left).bit_length() * abs(right), 64)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is ignored."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without attributes that expose the interpreter's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} starts with _")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _aliased(message: Message) -> dict[str, Any]:
    """A copy without null fields, with reasoning under every name that templates read."""
    kept = {name: value for name, value in message.items() if value is not None}
    for name in REASONING_FIELDS:
        if name in kept:
            return {"thinking": kept[name], **kept, "reasoning_content": kept[name]}
    return kept


def _tag_final(chat: list[dict[str, Any]], source: str) -> str:
    """Marks the end of the final message's content, and returns that content."""
    content = chat[-1].get("content") if chat else None
    if not isinstance(content, str):
        raise ChatTemplateError("continue_final_message: the final message has no text to continue")
    if "content" not in source:
        raise ChatTemplateError("continue_final_message: the chat template reads no content")
    chat[-1] = {**chat[-1], "content": content + CONTINUE_TAG}
    return content


def _cut_at_tag(text: str, final: str) -> str:
    position = text.rfind(CONTINUE_TAG.strip())
    if position < 0 or final.strip() not in text:
        raise ChatTemplateError(
            "continue_final_message: the chat template does not render the final message as it is"
        )
    if text.startswith(CONTINUE_TAG, position):
        return text[:position]
    return text[:position].rstrip()
