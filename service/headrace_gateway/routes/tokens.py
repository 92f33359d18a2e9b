"""POST /tokenize and /detokenize, and what tokenizers of other programs need to know; as vLLM's."""

from typing import Any

from fastapi import APIRouter, Request

from ..chat_output import tooling
from ..errors import invalid
from ..models import ServedModel
from ..prompts import ChatOptions
from ..schemas import DetokenizeRequest, TokenizeRequest
from ..services import Services, WithServices
from .documents import body_of

router = APIRouter()


@router.post("/tokenize", openapi_extra=body_of(TokenizeRequest))
async def tokenize(request: Request, services: WithServices) -> dict[str, Any]:
    """Token ids of a prompt, or of a chat as the model would see it."""
    body = await services.body(request, TokenizeRequest)
    model = await services.models.find(body.model)
    context = await services.admission.known_context(model)
    ids = await _encode(body, model, services)
    tokens = [model.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": context,
        "tokens": ids,
        "token_strs": tokens,
    }


@router.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
async def detokenize(request: Request, services: WithServices) -> dict[str, Any]:
    """Text of token ids."""
    body = await services.body(request, DetokenizeRequest)
    model = await services.models.find(body.model)
    return {"prompt": await services.prompts.decode(model, body.tokens)}


@router.get("/tokenizer_info")
async def tokenizer_info(services: WithServices, model: str | None = None) -> dict[str, Any]:
    """Special tokens by their names, such as `eos_token`, and the chat template."""
    found = await services.models.find(model)
    template = found.chat_template
    return {
        **found.tokenizer.special_tokens,
        "chat_template": None if template is None else template.source,
    }


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
    )
    return await services.prompts.chat(model, body.messages, options)
