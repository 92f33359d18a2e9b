"""The file of API keys: each key's tenant, models, limits and expiry. It holds hashes, never a key.

A key is 256 random bits and cannot be guessed, so one SHA-256 suffices: a slow hash or a salt would
add nothing. Gateways read the file, the command line writes it.
"""

import base64
import binascii
import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import yaml
from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from ..errors import HeadraceError

KEY_PREFIX = "hr-"
SHOWN_CHARS = len(KEY_PREFIX) + 5
MAX_KEY_CHARS = 512
MAX_FILE_BYTES = 4 * 2**20
SECRET_FIELD = "keys.yaml"  # noqa: S105 - a name, not a secret
DEFAULT_TENANT = "default"

_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
Name = Annotated[str, StringConstraints(pattern=f"^{_NAME}$")]
_Hash = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
_ModelName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class ApiKeysError(HeadraceError):
    """A file of keys cannot be used; the message says where and why, without a field's content."""

    code = "api_keys_invalid"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class KeyLimits(_Entry):
    """The limits of one key over all gateways; None means no limit.

    Rates are token buckets: one minute's amount may be used at once, then it refills evenly. Days
    begin at midnight UTC.
    """

    requests_per_minute: int | None = Field(None, ge=1, le=10**9)
    tokens_per_minute: int | None = Field(None, ge=1, le=10**12)
    concurrency: int | None = Field(None, ge=1, le=10**6)
    prompt_tokens_per_day: int | None = Field(None, ge=1, le=10**15)
    output_tokens_per_day: int | None = Field(None, ge=1, le=10**15)

    @property
    def unlimited(self) -> bool:
        return self == KeyLimits()


class ApiKey(_Entry):
    """One key. `models` None allows all models.

    `tenant_weight` is the tenant's share of a model relative to those of other tenants; all keys of
    a tenant have the same. `priority_ceiling` is the most urgent `priority` that it may request
    (lower is sooner). If that is later than normal, it is also the key's default.
    """

    id: Name
    hash: _Hash
    prefix: str = Field("", max_length=16)
    tenant: Name = DEFAULT_TENANT
    tenant_weight: float = Field(1.0, ge=0.01, le=100)
    models: tuple[_ModelName, ...] | None = None
    limits: KeyLimits = KeyLimits()
    priority_ceiling: int = Field(0, ge=-(2**31), lt=2**31)
    created: AwareDatetime | None = None
    expires: AwareDatetime | None = None

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.hash.removeprefix("sha256:"))

    def expired(self, now: datetime) -> bool:
        return self.expires is not None and self.expires <= now

    def allows(self, model: str) -> bool:
        return self.models is None or model in self.models


class _File(_Entry):
    keys: tuple[ApiKey, ...]

    @model_validator(mode="after")
    def _tells_keys_apart(self) -> "_File":
        for name in ("id", "hash"):
            values = [getattr(key, name) for key in self.keys]
            again = next((value for value in values if values.count(value) > 1), None)
            if again is not None:
                twice = again if name == "id" else _ids_of(self.keys, again)
                raise ValueError(f"two keys have the same {name}: {twice}")
        return self

    @model_validator(mode="after")
    def _weighs_each_tenant_once(self) -> "_File":
        weights: dict[str, float] = {}
        for key in self.keys:
            if weights.setdefault(key.tenant, key.tenant_weight) != key.tenant_weight:
                raise ValueError(
                    f"two keys of the tenant {key.tenant} have different tenant_weight: "
                    f"{weights[key.tenant]:g} and {key.tenant_weight:g}"
                )
        return self


def _ids_of(keys: Sequence[ApiKey], digest: str) -> str:
    return ", ".join(key.id for key in keys if key.hash == digest)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new key. `secret` is shown once and not stored."""

    secret: str
    entry: ApiKey

    def __repr__(self) -> str:
        return f"NewKey(entry={self.entry!r})"


def hash_key(secret: str) -> str:
    """The hash of a key, as files hold it."""
    return f"sha256:{hashlib.sha256(secret.encode()).hexdigest()}"


def new_key(key_id: str, now: datetime, **fields: Any) -> NewKey:
    """Makes a key. Raises ApiKeysError for an invalid field."""
    secret = KEY_PREFIX + secrets.token_urlsafe(32)
    try:
        entry = ApiKey(
            id=key_id,
            hash=hash_key(secret),
            prefix=secret[:SHOWN_CHARS],
            created=now.astimezone(UTC).replace(microsecond=0),
            **fields,
        )
    except ValidationError as error:
        raise ApiKeysError(_first_fault(error)) from error
    return NewKey(secret, entry)


def read_keys(content: bytes) -> tuple[ApiKey, ...]:
    """The keys of a YAML or JSON file, or of a Secret's manifest that holds one.

    Raises ApiKeysError.
    """
    if len(content) > MAX_FILE_BYTES:
        raise ApiKeysError(f"{len(content)} bytes are over {MAX_FILE_BYTES}")
    body = _load(content)
    if isinstance(body, dict) and body.get("kind") == "Secret":
        body = _load(_of_secret(body))
    if not isinstance(body, dict):
        raise ApiKeysError("must be a map with the field keys")
    try:
        return _File.model_validate(body).keys
    except ValidationError as error:
        raise ApiKeysError(_first_fault(error)) from None


def _load(content: bytes) -> Any:
    try:
        return yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where is not None else ""
        raise ApiKeysError(f"neither YAML nor JSON{line}") from None


def _of_secret(manifest: dict[str, Any]) -> bytes:
    plain, encoded = manifest.get("stringData"), manifest.get("data")
    if isinstance(plain, dict) and isinstance(plain.get(SECRET_FIELD), str):
        return str(plain[SECRET_FIELD]).encode()
    if isinstance(encoded, dict) and isinstance(encoded.get(SECRET_FIELD), str):
        try:
            return base64.b64decode(encoded[SECRET_FIELD], validate=True)
        except binascii.Error as error:
            raise ApiKeysError(f"data.{SECRET_FIELD}: not base64") from error
    raise ApiKeysError(f"the Secret has no {SECRET_FIELD}")


def write_keys(keys: Sequence[ApiKey]) -> str:
    """The file's text; `read_keys` reads it back."""
    entries = [key.model_dump(mode="json", exclude_defaults=True) for key in keys]
    return yaml.safe_dump({"keys": entries}, sort_keys=False)


def secret_manifest(name: str, keys: Sequence[ApiKey], namespace: str | None = None) -> str:
    """A Kubernetes Secret that gateways mount, with the file as its only field."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", name):
        raise ApiKeysError(f"{name!r} is not a valid name of a Secret: use a-z, 0-9, '-' and '.'")
    metadata = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "stringData": {SECRET_FIELD: _Block(write_keys(keys))},
    }
    return str(yaml.dump(manifest, Dumper=_Dumper, sort_keys=False))


class _Block(str):
    """Text that YAML writes as a block, line by line."""


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes _Block."""


_Dumper.add_representer(
    _Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def _first_fault(error: ValidationError) -> str:
    """The invalid field and what it must be, without its content, which could be a key."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(map(str, fault["loc"]))
    reason = fault["msg"].removeprefix("Value error, ")
    return f"{path}: {reason}" if path else reason
