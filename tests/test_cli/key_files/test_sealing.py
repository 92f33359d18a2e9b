"""`headrace sealing` as a person or a script runs it."""

import base64
import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from headrace_cli.commands.sealing import app
from headrace_common.sealing.keyring import read_keyring


def sealing(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keyring"


def names(file: Path) -> list[str]:
    return read_keyring(file.read_bytes()).names


def test_a_new_file_has_one_key_and_only_its_owner_can_read_it(file: Path) -> None:
    done = sealing("create", "--file", file)

    (name,) = names(file)
    assert done.exit_code == 0 and name in done.stdout
    assert file.read_text().strip() not in done.output
    assert file.stat().st_mode & 0o777 == 0o600


def test_an_existing_file_is_not_overwritten(file: Path) -> None:
    sealing("create", "--file", file)
    before = file.read_bytes()
    done = sealing("create", "--file", file)

    assert done.exit_code != 0 and "is there already" in str(done.exception)
    assert file.read_bytes() == before


def test_a_key_is_added_used_and_the_old_one_removed(file: Path) -> None:
    sealing("create", "--file", file)
    (old,) = names(file)
    added = sealing("add", "--file", file)
    _, new = names(file)
    assert names(file)[0] == old and "Once all gateways and engines have read it" in added.stderr
    assert "use another key first" in str(sealing("remove", old, "--file", file).exception)
    sealing("use", new, "--file", file)
    assert names(file) == [new, old]
    sealing("remove", old, "--file", file)
    listed = json.loads(sealing("list", "--file", file, "--json").stdout)

    assert listed == [{"id": new, "seals": True}]


def test_a_missing_key_is_named(file: Path) -> None:
    sealing("create", "--file", file)

    assert "there is no key 0f" in str(sealing("use", "0f", "--file", file).exception)
    assert "headrace sealing create" in str(sealing("list", "--file", f"{file}x").exception)


def test_a_secret_holds_the_file(file: Path) -> None:
    sealing("create", "--file", file)
    done = sealing("secret", "headrace-sealing", "--file", file, "--namespace", "ns")
    manifest = yaml.safe_load(done.stdout)

    assert manifest["metadata"] == {"name": "headrace-sealing", "namespace": "ns"}
    assert base64.b64decode(manifest["data"]["keyring"]) == file.read_bytes()
