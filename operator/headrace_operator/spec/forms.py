"""Formats of a ModelService's texts, described in words.

The API server checks each format by a rule of the schema, and the operator checks it too, with the
same message. For a bare pattern the message would be a regular expression.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True, slots=True)
class Form:
    """A format of texts.

    `pattern` is valid in Python and RE2; `numbers` allows whole numbers, too.
    """

    pattern: str
    must_be: str
    max_length: int = 253
    numbers: bool = False

    @property
    def message(self) -> str:
        return f"must be {self.must_be}"

    @property
    def rule(self) -> str:
        """The rule in CEL; the schema bounds the length."""
        text = f"self.matches(r'{self.pattern}')"
        return f"type(self) == int ? self >= 0 : {text}" if self.numbers else text

    def check(self, value: str | int) -> str | int:
        """Raises ValueError, which pydantic makes a problem of the field."""
        if isinstance(value, int):
            good = value >= 0
        else:
            matches = re.fullmatch(self.pattern, value, re.ASCII)
            good = len(value) <= self.max_length and matches is not None
        if not good:
            raise ValueError(f"{value!s:.80} is wrong: {self.message}")
        return value

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        value = "string(self)" if self.numbers else "self"  # string() is costly
        message = f"{value} + ' is wrong: {self.message}'"
        rules = [{"rule": self.rule, "message": self.message, "messageExpression": message}]
        return {
            **handler(schema),
            "maxLength": self.max_length,
            "x-kubernetes-validations": rules,
        }


_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"

Quantity = Annotated[
    str | int,
    Form(
        r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][0-9]+)?$",
        "a quantity of Kubernetes, as 500m, 4 or 2Gi (not 2GiB or 2Gb)",
        max_length=32,
        numbers=True,
    ),
]
Bytes = Annotated[
    str | int,
    Form(
        r"^[0-9]+(\.[0-9]+)?\s*([kKmMgGtTpPeE]([iI]?[bB])?|[bB])?$",
        "a number of bytes, as 512MiB or 2GiB (not 2Gi)",
        max_length=32,
        numbers=True,
    ),
]
ObjectName = Annotated[
    str,
    Form(
        rf"^{_LABEL}(\.{_LABEL})*$",
        "a name of a Kubernetes object: small letters, digits, - and . between them",
    ),
]
ClaimName = Annotated[
    str,
    Form(
        rf"^{_LABEL}$",
        "a name of a PersistentVolumeClaim: small letters, digits, and - between them",
    ),
]
VariableName = Annotated[str, Form(r"^[A-Za-z_][A-Za-z0-9_]*$", "a name of a variable, as HF_HOME")]
HubId = Annotated[str, Form(r"^[\w.-]+(/[\w.-]+)?$", "a hub id, as Qwen/Qwen3-8B", max_length=256)]
RelativePath = Annotated[
    str,
    Form(
        r"^([\w.-]+(/[\w.-]+)*)?$",
        "a folder inside the volume, as models/qwen: without a slash at its ends",
        max_length=1024,
    ),
]
AbsolutePath = Annotated[
    str, Form(r"^/\S+$", "an absolute path inside the pod, as /model/sql", max_length=1024)
]
LocalPath = Annotated[
    str,
    Form(
        r"^(headrace-demo(-embeddings|-vision)?|/\S+)$",
        "headrace-demo, headrace-demo-embeddings, headrace-demo-vision or an absolute path inside "
        "the image",
        max_length=1024,
    ),
]
HttpUrl = Annotated[str, Form(r"^https?://.+", "a URL, as http://prometheus:9090", max_length=2048)]
S3Uri = Annotated[str, Form(r"^s3://[a-z0-9][a-z0-9.-]+/[^\s?#]+$", "s3://bucket/folder", 2048)]
BucketUri = Annotated[
    str,
    Form(r"^(s3|gs)://[^/\s]+/\S+$", "s3://bucket/folder or gs://bucket/folder", 2048),
]
Device = Annotated[
    str, Form(r"^(auto|cpu|cuda(:[0-9]+)?)$", "auto, cpu, cuda, or as cuda:1", max_length=16)
]


class Free:
    """Annotations of pods, except those that weaken isolation or belong to the operator."""

    PREFIXES = (
        "container.apparmor.security.beta.kubernetes.io/",
        "container.seccomp.security.alpha.kubernetes.io/",
        "seccomp.security.alpha.kubernetes.io/",
        "controller.kubernetes.io/",
        "headrace.dev/",
    )
    MESSAGE = (
        f"must not begin with {', '.join(PREFIXES)}: engines keep the runtime's profiles, and the "
        "operator chooses the pods that go"
    )

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        clauses = " && ".join(f"!key.startsWith('{prefix}')" for prefix in self.PREFIXES)
        rules = [{"rule": f"self.all(key, {clauses})", "message": f"keys {self.MESSAGE}"}]
        return {**handler(schema), "x-kubernetes-validations": rules}

    def check(self, annotations: dict[str, str]) -> dict[str, str]:
        """Raises ValueError, which pydantic makes a problem of the field."""
        for key in annotations:
            if key.startswith(self.PREFIXES):
                raise ValueError(f"{key:.120} is wrong: keys {self.MESSAGE}")
        return annotations


Annotations = Annotated[dict[str, str], Free()]
