"""`headrace keys` as a person or a script runs it."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from headrace_cli.commands.keys import app
from headrace_cli.errors import UsageError
from headrace_cli.key_files.keys import expiry
from headrace_common.config.api_keys import ApiKey, hash_key, read_keys

NOW = datetime(2027, 1, 1, 12, tzinfo=UTC)


def keys(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def entries(file: Path) -> dict[str, ApiKey]:
    return {key.id: key for key in read_keys(file.read_bytes())}


def test_a_new_key_is_shown_once_and_kept_as_a_hash(file: Path) -> None:
    done = keys("create", "alice", "--file", file)
    secret = done.stdout.strip()

    assert done.exit_code == 0
    assert secret.startswith("hr-") and "\n" not in secret
    assert "shown this once" in done.stderr and secret not in done.stderr
    assert entries(file)["alice"].hash == hash_key(secret)
    assert secret not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert secret not in keys("list", "--file", file).stdout


def test_every_field_can_be_given(file: Path) -> None:
    done = keys(
        *("create", "alice", "--file", file, "--tenant", "team-a", "--model", "a", "--model", "b"),
        *("--requests-per-minute", 60, "--tokens-per-minute", 1000, "--concurrency", 4),
        *("--prompt-tokens-per-day", 7000, "--output-tokens-per-day", 5000),
        *("--priority-ceiling", -2, "--expires", "2099-01-31", "--json"),
    )
    shown = json.loads(done.stdout)
    key = entries(file)["alice"]

    assert hash_key(shown.pop("key")) == key.hash
    assert shown == key.model_dump(mode="json", exclude={"hash"})
    assert (key.tenant, key.models, key.priority_ceiling) == ("team-a", ("a", "b"), -2)
    assert key.limits.model_dump() == {
        "requests_per_minute": 60,
        "tokens_per_minute": 1000,
        "concurrency": 4,
        "prompt_tokens_per_day": 7000,
        "output_tokens_per_day": 5000,
    }
    assert key.expires == datetime(2099, 1, 31, tzinfo=UTC)


def test_all_keys_of_a_tenant_have_one_weight(file: Path) -> None:
    keys("create", "alice", "--file", file, "--tenant", "a", "--tenant-weight", 3)
    keys("create", "bob", "--file", file, "--tenant", "a")
    keys("create", "carol", "--file", file)
    refused = keys("create", "dan", "--file", file, "--tenant", "a", "--tenant-weight", 2)

    weights = {name: key.tenant_weight for name, key in entries(file).items()}
    assert weights == {"alice": 3, "bob": 3, "carol": 1}
    assert isinstance(refused.exception, UsageError)
    assert "--tenant-weight 3" in str(refused.exception)
    assert keys("list", "--file", file).stdout.count("a (weight 3)") == 2


def test_the_list_has_a_line_for_each_key(file: Path) -> None:
    keys("create", "alice", "--file", file, "--requests-per-minute", 60)
    keys("create", "bob", "--file", file, "--model", "m")
    table = keys("list", "--file", file).stdout
    listed = json.loads(keys("list", "--file", file, "--json").stdout)

    assert "60 requests/min" in table and "bob" in table
    assert [(key["id"], key["models"], key["expired"]) for key in listed] == [
        ("alice", None, False),
        ("bob", ["m"], False),
    ]
    assert "hash" not in listed[0]


def test_revoked_keys_are_gone(file: Path) -> None:
    for name in ("a", "b", "c"):
        keys("create", name, "--file", file)
    done = keys("revoke", "a", "c", "--file", file)

    assert done.exit_code == 0 and "Revoked a, c" in done.stderr
    assert list(entries(file)) == ["b"]


def test_a_secret_is_printed_as_kubectl_takes_it(file: Path) -> None:
    keys("create", "first", "--file", file)
    done = keys("create", "alice", "--file", file, "--secret", "hr-keys", "--namespace", "llm")
    manifest = yaml.safe_load(done.stdout)

    assert manifest["kind"] == "Secret"
    assert manifest["metadata"] == {"name": "hr-keys", "namespace": "llm"}
    assert [key.id for key in read_keys(done.stdout.encode())] == ["first", "alice"]
    secret = next(line for line in done.stderr.splitlines() if line.startswith("hr-"))
    assert hash_key(secret) == entries(file)["alice"].hash
    assert secret not in done.stdout


def test_a_secret_needs_no_file(tmp_path: Path) -> None:
    done = keys("create", "alice", "--secret", "hr-keys")

    assert [key.id for key in read_keys(done.stdout.encode())] == ["alice"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create", "alice"], "no place for the keys is given"),
        (["create", "a b", "--file", "F"], "id: "),
        (["create", "known", "--file", "F"], "there is a key known already"),
        (["create", "a", "--file", "F", "--tenant", "a/b"], "tenant: "),
        (["create", "a", "--file", "F", "--expires", "soon"], "'soon' is not a time"),
        (["create", "a", "--file", "F", "--expires", "2020-01-01"], "is over already"),
        (["create", "a", "--file", "F", "--secret", "A_B"], "not a valid name of a Secret"),
        (["create", "a", "--file", "/proc/none/keys.yaml"], "cannot be written"),
        (["revoke", "known", "other", "--file", "F"], "there is no key other"),
        (["revoke", "known"], "no file of keys is given"),
    ],
)
def test_wrong_arguments_are_refused_and_change_no_file(
    file: Path, arguments: list[str], message: str
) -> None:
    keys("create", "known", "--file", file)
    before = file.read_bytes()
    done = keys(*(file if argument == "F" else argument for argument in arguments))

    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)
    assert file.read_bytes() == before


def test_a_broken_file_is_never_overwritten(file: Path) -> None:
    file.write_text("keys: [{id: a, hash: nonsense}]")
    done = keys("create", "b", "--file", file)

    assert "keys.0.hash" in str(done.exception)
    assert file.read_text() == "keys: [{id: a, hash: nonsense}]"


def test_writers_at_the_same_time_lose_nothing(file: Path) -> None:
    def one(number: int) -> int:
        command = [sys.executable, "-m", "headrace_cli", "keys", "create", f"k{number}"]
        done = subprocess.run([*command, "--file", file], capture_output=True, timeout=60)
        return done.returncode

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(4))) == [0] * 4
    assert sorted(entries(file)) == ["k0", "k1", "k2", "k3"]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("90d", NOW + timedelta(days=90)),
        ("12h", NOW + timedelta(hours=12)),
        ("2w", NOW + timedelta(days=14)),
        ("2027-02-01", datetime(2027, 2, 1, tzinfo=UTC)),
        ("2027-02-01T10:00:00+02:00", datetime(2027, 2, 1, 8, tzinfo=UTC)),
    ],
)
def test_an_expiry_is_a_duration_or_a_time(text: str, at: datetime) -> None:
    assert expiry(text, NOW) == at
