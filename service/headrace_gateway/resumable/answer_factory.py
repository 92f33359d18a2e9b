"""Makes the answers of all operations, by the names that are stored with requests."""

from collections.abc import Callable, Mapping, Sequence

from headrace_common.wire.messages import GenerateRequest

from ..anthropic.answer import MessagesAnswer
from ..models.models import ServedModel
from ..openai.answers import Answer, AnswerOptions, CompletionAnswer
from ..openai.parsed_chat import chat_answer
from ..openai.prompt_echo import with_prompt_echo
from ..openai.prompt_echo_options import PromptEchoOptions
from ..openai.responses.answer import ResponsesAnswer
from ..parsing.output import OutputForm

ANSWERS: Mapping[str, Callable[[AnswerOptions], Answer]] = {
    "chat": chat_answer,
    "text_completion": CompletionAnswer,
    "responses": ResponsesAnswer,
    "messages": MessagesAnswer,
}


def make_answer(
    operation: str,
    requests: Sequence[GenerateRequest],
    model: ServedModel,
    *,
    answer_id: str,
    include_usage: bool,
    shows_ids: bool,
    form: OutputForm,
    prompt_echo: PromptEchoOptions | None = None,
) -> Answer:
    """Returns an empty answer to the requests of one HTTP request, in its operation's form."""
    sampling = requests[0].sampling
    options = AnswerOptions(
        answer_id=answer_id,
        model=model.name,
        system_fingerprint=model.system_fingerprint,
        created=requests[0].created_ms // 1000,
        tokenizer=model.tokenizer,
        choices=sampling.n * len(requests),
        choices_per_prompt=sampling.n,
        logprobs=sampling.logprobs,
        include_usage=include_usage,
        shows_ids=shows_ids,
        prompts=[request.prompt_token_ids for request in requests],
        form=form,
        prompt_echo=prompt_echo,
    )
    return with_prompt_echo(ANSWERS[operation](options), options)
