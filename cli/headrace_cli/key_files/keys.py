"""`headrace keys`: makes, lists and revokes API keys in a file that gateways read.

A key is shown once, when it is made. The file has hashes and is replaced in one step, so that a
gateway reads either the old file or the new one.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.table import Table

from headrace_common.config.api_keys import (
    ApiKey,
    ApiKeysError,
    KeyLimits,
    NewKey,
    new_key,
    read_keys,
    secret_manifest,
    write_keys,
)

from ..errors import UsageError
from ..tables import Output, plain_table
from .secret_files import locked, replace

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_SPAN = re.compile(r"(\d{1,6})([mhdw])")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStorage:
    """Where keys are stored: a file, a Secret whose manifest is printed, or both."""

    file: Path | None = None
    secret: str | None = None
    namespace: str | None = None


class KeyRecords:
    """The keys of a storage, read and written under a lock."""

    def __init__(self, storage: KeyStorage) -> None:
        if storage.file is None and storage.secret is None:
            raise UsageError(
                "no place for the keys is given",
                "name a file with --file or HEADRACE_GATEWAY_API_KEYS_FILE, or print a Secret with "
                "--secret",
            )
        self._storage = storage

    def read(self) -> tuple[ApiKey, ...]:
        """The present keys; none if there is no file yet."""
        file = self._storage.file
        if file is None:
            return ()
        try:
            return read_keys(file.read_bytes())
        except FileNotFoundError:
            return ()
        except (OSError, ApiKeysError) as error:
            raise UsageError(f"{file} cannot be read", _reason(error)) from error

    def change(self, change: Callable[[tuple[ApiKey, ...]], Sequence[ApiKey]]) -> str | None:
        """Replaces the keys by the result of `change`; returns the Secret's manifest, if any."""
        if self._storage.file is None:
            return self._manifest(change(()))
        with locked(self._storage.file):
            keys = change(self.read())
            manifest = self._manifest(keys)
            replace(self._storage.file, write_keys(keys))
        return manifest

    def _manifest(self, keys: Sequence[ApiKey]) -> str | None:
        if self._storage.secret is None:
            return None
        try:
            return secret_manifest(self._storage.secret, keys, self._storage.namespace)
        except ApiKeysError as error:
            raise UsageError(str(error)) from error


def create(
    records: KeyRecords, key_id: str, fields: dict[str, Any], output: Output, now: datetime
) -> None:
    """Makes a key and shows it. Without a `tenant_weight` it gets that of its tenant's other
    keys."""
    weight = _tenant_weight(records.read(), fields["tenant"], fields["tenant_weight"])
    made = _made(key_id, {**fields, "tenant_weight": weight}, now)

    def add(keys: tuple[ApiKey, ...]) -> Sequence[ApiKey]:
        if any(key.id == key_id for key in keys):
            raise UsageError(f"there is a key {key_id} already", "revoke it or take another id")
        return (*keys, made.entry)

    manifest = records.change(add)
    if output.as_json:
        output.json({"key": made.secret, **_shown(made.entry), **_secret(manifest)})
        return
    output.notes.print(_table([made.entry], now))
    output.notes.print("The key is shown this once: only its hash is kept.")
    if manifest is None:
        output.raw(f"{made.secret}\n")  # alone, so that a script can take it
    else:
        output.notes.print(made.secret, style="bold", markup=False, soft_wrap=True)
        output.raw(manifest)


def show(records: KeyRecords, output: Output, now: datetime) -> None:
    """Lists the keys."""
    keys = records.read()
    if keys or output.as_json:
        listed = [{**_shown(key), "expired": key.expired(now)} for key in keys]
        output.show(listed, _table(keys, now))
    else:
        output.notes.print("There are no keys; make one with headrace keys create.")


def revoke(records: KeyRecords, key_ids: Sequence[str], output: Output) -> None:
    """Removes keys. Raises UsageError if one does not exist; then none is removed."""

    def remove(keys: tuple[ApiKey, ...]) -> Sequence[ApiKey]:
        unknown = sorted(set(key_ids) - {key.id for key in keys})
        if unknown:
            raise UsageError(f"there is no key {', '.join(unknown)}", "see headrace keys list")
        return [key for key in keys if key.id not in key_ids]

    manifest = records.change(remove)
    if output.as_json:
        output.json({"revoked": list(key_ids), **_secret(manifest)})
        return
    output.notes.print(f"Revoked {', '.join(key_ids)}. Gateways follow within seconds.")
    if manifest is not None:
        output.raw(manifest)


def fields_of(
    *,
    tenant: str,
    tenant_weight: float | None,
    models: Sequence[str],
    limits: KeyLimits,
    priority_ceiling: int,
    expires: str | None,
    now: datetime,
) -> dict[str, Any]:
    """The fields of a new key, as given by flags."""
    return {
        "tenant": tenant,
        "tenant_weight": tenant_weight,
        "models": tuple(models) or None,
        "limits": limits,
        "priority_ceiling": priority_ceiling,
        "expires": None if expires is None else expiry(expires, now),
    }


def expiry(text: str, now: datetime) -> datetime:
    """`90d`, `12h`, `30m`, `2w` from now, or a time in ISO 8601 (UTC if it has no zone)."""
    if span := _SPAN.fullmatch(text):
        return (now + timedelta(**{_UNITS[span[2]]: int(span[1])})).replace(microsecond=0)
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(
            f"{text!r} is not a time",
            "give a span as 90d or 12h, or a time as 2027-01-31T12:00:00Z",
        ) from error
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    if at <= now:
        raise UsageError(f"{text} is over already", "give a time to come")
    return at


def _made(key_id: str, fields: dict[str, Any], now: datetime) -> NewKey:
    try:
        return new_key(key_id, now, **fields)
    except ApiKeysError as error:
        raise UsageError(str(error)) from error


def _tenant_weight(keys: Sequence[ApiKey], tenant: str, asked: float | None) -> float:
    known = next((key.tenant_weight for key in keys if key.tenant == tenant), None)
    if known is None or asked is None:
        return known or asked or 1.0
    if known != asked:
        raise UsageError(
            f"other keys of the tenant {tenant} have --tenant-weight {known:g}",
            "leave the option out, or change those keys in the file",
        )
    return known


def _shown(key: ApiKey) -> dict[str, Any]:
    return key.model_dump(mode="json", exclude={"hash"})


def _secret(manifest: str | None) -> dict[str, str]:
    return {} if manifest is None else {"manifest": manifest}


def _table(keys: Sequence[ApiKey], now: datetime) -> Table:
    table = plain_table("id", "key", "tenant", "models", "limits", "priority", "expires")
    for key in keys:
        models = "all" if key.models is None else ", ".join(key.models) or "none"
        expires = "never" if key.expires is None else f"{key.expires:%Y-%m-%d %H:%M}"
        if key.expired(now):
            expires += " (over)"
        table.add_row(
            key.id, f"{key.prefix}...", _tenant(key), models, _limits(key.limits),
            f"{key.priority_ceiling}+", expires,
        )  # fmt: skip
    return table


def _tenant(key: ApiKey) -> str:
    weight = key.tenant_weight
    return key.tenant if weight == 1 else f"{key.tenant} (weight {weight:g})"


def _limits(limits: KeyLimits) -> str:
    named = (
        (limits.requests_per_minute, "requests/min"),
        (limits.tokens_per_minute, "tokens/min"),
        (limits.concurrency, "at once"),
        (limits.prompt_tokens_per_day, "prompt tokens/day"),
        (limits.output_tokens_per_day, "output tokens/day"),
    )
    return ", ".join(f"{value} {unit}" for value, unit in named if value is not None) or "none"


def _reason(error: OSError | ApiKeysError) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
