"""POST /tokenize, /detokenize and GET /tokenizer_info, as in vLLM."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from ...errors import invalid
from ...generation.prompts import ChatOptions
from ...models.models import ServedModel
from ...parsing.chat_output import tooling
from ...schemas.answers import Detokenized, Tokenized, TokenizerInfo
from ...schemas.completions import DetokenizeRequest, TokenizeRequest
from ..services import Services, services_of
from .documents import answer_of, body_of

# Token ids that are written at a time.
PIECE = 16_384

router = APIRouter()


@router.post("/tokenize", openapi_extra=body_of(TokenizeRequest), **answer_of(Tokenized))
async def tokenize(request: Request) -> Response:
    """Returns the token ids of a prompt, or of a chat as the model would see it."""
    services = services_of(request)
    body = await services.body(request, TokenizeRequest)
    model = await services.models.find(body.model)
    context = await services.admission.known_context(model)
    named = model if body.return_token_strs else None

    async def read() -> tuple[str, int]:
        ids = await _encode(body, model, services)
        content = await services.pipeline.work.run(len(ids), partial(_content, ids, context, named))
        return content, len(ids)

    content, headers = await services.pipeline.charged(request, read)
    return Response(content, headers=headers, media_type="application/json")


@router.post("/detokenize", openapi_extra=body_of(DetokenizeRequest), **answer_of(Detokenized))
async def detokenize(request: Request) -> Response:
    """Returns the text of token ids."""
    services = services_of(request)
    body = await services.body(request, DetokenizeRequest)
    model = await services.models.find(body.model)

    async def read() -> tuple[str, int]:
        text = await services.prompts.decode(model, body.tokens)
        content = await services.pipeline.work.run(len(text), partial(_json, {"prompt": text}))
        return content, len(body.tokens)

    content, headers = await services.pipeline.charged(request, read)
    return Response(content, headers=headers, media_type="application/json")


@router.get("/tokenizer_info", **answer_of(TokenizerInfo))
async def tokenizer_info(request: Request, model: str | None = None) -> dict[str, Any]:
    """Returns special tokens by name, such as `eos_token`, and the chat template."""
    found = await services_of(request).models.find(model)
    template = found.chat_template
    return {
        **found.tokenizer.special_tokens,
        "chat_template": None if template is None else template.source,
    }


def _content(ids: Sequence[int], context: int | None, named: ServedModel | None) -> str:
    """Returns the answer, written in pieces so that other work can run between two of them."""
    fields = {
        "count": json.dumps(len(ids)),
        "max_model_len": json.dumps(context),
        "tokens": f"[{','.join(_written(ids, None))}]",
        "token_strs": "null" if named is None else f"[{','.join(_written(ids, named))}]",
    }
    return "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"


def _written(ids: Sequence[int], named: ServedModel | None) -> Iterator[str]:
    for start in range(0, len(ids), PIECE):
        some = ids[start : start + PIECE]
        values = some if named is None else [named.tokenizer.id_to_token(i) for i in some]
        yield _json(values)[1:-1]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def _encode(body: TokenizeRequest, model: ServedModel, services: Services) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Give either prompt or messages.", param="prompt")
    if body.messages is None:
        special = body.add_special_tokens is not False
        return await services.prompts.text(model, body.prompt or "", add_special_tokens=special)
    options = ChatOptions(
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens is True,
        variables=body.chat_template_kwargs,
        tools=tooling(body.tools, None).for_template(),
        video_fps=body.media_io_kwargs.video.fps,
    )
    return (await services.prompts.chat(model, body.messages, options)).token_ids
