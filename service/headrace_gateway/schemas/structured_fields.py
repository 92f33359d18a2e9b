"""The fields of requests that constrain an output: OpenAI's and vLLM's."""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool

from headrace_common.structured.structural_tag import MAX_STRUCTURES
from headrace_common.structured.structured import (
    MAX_CHOICES,
    StructuredOutputError,
    StructuredOutputsParams,
)

from ..errors import ApiError, invalid
from ..limits.fields import FreeObject, Items, Name, Text
from .chat_messages import Body

Schema = FreeObject | Text


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    """`strict` has no effect: the output always matches the schema."""

    name: Name
    schema_: FreeObject = Field(alias="schema")
    description: Text | None = None
    strict: StrictBool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class TagStructure(Body):
    begin: Text
    schema_: FreeObject = Field(alias="schema")
    end: Text = ""


class StructuralTag(Body):
    """Free text until one of the `triggers`, then a structure that begins with it; or a `format`.

    Formats are those of headrace_common.structured.structural_format.
    """

    type: Literal["structural_tag"] = "structural_tag"
    structures: Items[TagStructure] | None = Field(None, max_length=MAX_STRUCTURES)
    triggers: Items[Text] | None = Field(None, max_length=MAX_STRUCTURES)
    format: FreeObject | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were given, with the objects of schemas and formats themselves: a copy of
        many takes long."""
        fields = {"type": self.type, "triggers": self.triggers, "format": self.format}
        found: dict[str, Any] = {name: one for name, one in fields.items() if one is not None}
        if self.structures is not None:
            found["structures"] = [
                {"begin": one.begin, "schema": one.schema_, "end": one.end}
                for one in self.structures
            ]
        return found


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTag, Field(discriminator="type")
]


class StructuredOutputs(Body):
    """vLLM's constraints: exactly one of the fields."""

    json_: Schema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Items[Text] | None = Field(None, max_length=MAX_CHOICES)
    grammar: Text | None = None
    json_object: StrictBool | None = None
    structural_tag: StructuralTag | Text | None = None

    def params(self) -> StructuredOutputsParams:
        return StructuredOutputsParams(
            json=self.json_,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            json_object=self.json_object,
            structural_tag=self._structural_tag,
        )

    @property
    def _structural_tag(self) -> dict[str, Any] | str | None:
        tag = self.structural_tag
        return tag.given if isinstance(tag, StructuralTag) else tag


class StructuredBody(Body):
    """The fields of all requests that generate text; older names of vLLM's are `guided_*`."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Items[Text] | None = Field(None, max_length=MAX_CHOICES)
    guided_grammar: Text | None = None

    @property
    def structured_field(self) -> str | None:
        """The field that constrains the output. Raises ApiError if several do."""
        names = [name for name in StructuredBody.model_fields if getattr(self, name) is not None]
        if isinstance(self.response_format, TextFormat):
            names.remove("response_format")
        if len(names) > 1:
            raise invalid(f"Give only one of {', '.join(names)}.", param=names[-1])
        return names[0] if names else None

    def structured(self) -> StructuredOutputsParams | None:
        """Returns the constraint. Raises ApiError, which names the field."""
        field = self.structured_field
        if field is None:
            return None
        try:
            return _params(field, getattr(self, field))
        except StructuredOutputError as error:
            raise refused(field, error) from error


def refused(field: str, error: StructuredOutputError) -> ApiError:
    """Returns the error for a constraint that cannot be used; `field` is the request's."""
    return invalid(f"{field}: {error.message}.", param=field, code="invalid_structured_output")


def _params(field: str, value: Any) -> StructuredOutputsParams:
    if isinstance(value, StructuredOutputs):
        return value.params()
    if isinstance(value, JsonObjectFormat):
        return StructuredOutputsParams(json_object=True)
    if isinstance(value, JsonSchemaFormat):
        return StructuredOutputsParams(json=value.json_schema.schema_)
    if isinstance(value, StructuralTag):
        return StructuredOutputsParams(structural_tag=value.given)
    named: dict[str, Any] = {field.removeprefix("guided_"): value}
    return StructuredOutputsParams(**named)
