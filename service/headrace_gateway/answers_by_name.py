"""The answers by their operations' names, as they are kept with requests."""

from collections.abc import Callable, Mapping

from .answers import Answer, AnswerOptions, CompletionAnswer
from .messages_api.answer import MessagesAnswer
from .parsed_chat import chat_answer
from .responses_api.answer import ResponsesAnswer

ANSWERS: Mapping[str, Callable[[AnswerOptions], Answer]] = {
    "chat": chat_answer,
    "text_completion": CompletionAnswer,
    "responses": ResponsesAnswer,
    "messages": MessagesAnswer,
}
