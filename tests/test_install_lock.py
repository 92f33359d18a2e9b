"""The installer of locks uses uv, with pip's settings, or else pip; then it compiles bytecode."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import compile_packages
import install_lock

INDEX = "https://mirror.example/simple"
PIP = """#!/bin/sh
echo pip $* >> {log}
[ "$1" != config ] || echo "global.index-url='{index}'"
case "$*" in *--target*)
  mkdir -p $(dirname {uv})
  printf '#!/bin/sh\\necho uv $* $UV_DEFAULT_INDEX >> {log}; echo broken >&2; exit $UV' > {uv}
  chmod +x {uv}
esac
"""


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (f"global.index-url='{INDEX}'", {"UV_DEFAULT_INDEX": INDEX}),
        (
            f"global.index-url='https://other.example'\ninstall.index-url='{INDEX}'",
            {"UV_DEFAULT_INDEX": INDEX},
        ),
        (
            "global.extra-index-url='\\nhttps://a.example\\nhttps://b.example'",
            {
                "UV_INDEX": "https://a.example https://b.example",
                "UV_INDEX_STRATEGY": "unsafe-best-match",
            },
        ),
        (":env:.cert='/etc/ca.pem'\n:env:.default-timeout='180'",
         {"SSL_CERT_FILE": "/etc/ca.pem", "UV_HTTP_TIMEOUT": "180"}),
        ("download.index-url='https://other.example'\nglobal.quiet='1'", {}),
        (":env:.find-links='/no/such/folder'", {}),
        (":env:.find-links='/ https://wheels.example'",
         {"UV_FIND_LINKS": "/,https://wheels.example"}),
        ("global.proxy='http://proxy.example:3128'", {"ALL_PROXY": "http://proxy.example:3128"}),
    ],
    ids=["index", "the stronger section", "more indexes", "environment", "others", "no folder",
         "links", "proxy"],
)  # fmt: skip
def test_uv_gets_the_settings_of_pip(listed: str, expected: Mapping[str, str]) -> None:
    settings = install_lock.strongest(listed.splitlines())
    assert install_lock.uv_variables(settings, {}) == expected


def test_variables_that_uv_already_has_are_kept() -> None:
    given = {"UV_DEFAULT_INDEX": "https://mine.example"}
    assert install_lock.uv_variables({"index-url": INDEX}, given) == {}


def test_settings_of_pip_are_those_that_pip_itself_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_lock, "PIP", (sys.executable, "-m", "pip"))
    monkeypatch.setenv("PIP_INDEX_URL", INDEX)
    assert install_lock.pip_settings()["index-url"] == INDEX


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake pip that installs nothing: it writes its arguments to a file.

    It also makes a fake uv.
    """
    log = tmp_path / "log"
    program = tmp_path / "pip"
    uv = tmp_path / "uv/bin/uv"
    program.write_text(PIP.format(log=log, uv=uv, index=INDEX))
    program.chmod(0o755)
    monkeypatch.setattr(install_lock, "PIP", (str(program),))
    real = install_lock.uv
    monkeypatch.setattr(install_lock, "uv", lambda: real(tmp_path / "uv"))
    return log


def test_uv_installs_from_the_index_that_pip_uses(pip: Path) -> None:
    assert install_lock.install("-r", "up.txt") == 0
    assert install_lock.install("-e", ".") == 0
    calls = [line for line in pip.read_text().splitlines() if line != "pip config list"]
    options = f"--quiet --upgrade --target {pip.parent / 'uv'} --require-hashes"
    by_uv = f"uv pip install --quiet --python {sys.executable}"
    assert calls == [
        f"pip install {options} -r {install_lock.LOCKS / 'uv.txt'}",
        f"{by_uv} -r up.txt {INDEX}",
        f"{by_uv} -e . {INDEX}",
    ]


def test_pip_is_used_and_reported_where_uv_does_not_work(
    pip: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UV", "1")
    assert install_lock.install("-r", "up.txt") == 0
    assert pip.read_text().splitlines()[-1] == "pip install --quiet -r up.txt"
    assert capfd.readouterr().err == (
        "broken\nuv does not install: pip does, which takes minutes longer\n"
    )


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    packages = tmp_path / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    for name, text in {"good": "x = 1", "bad": "x ="}.items():
        (packages / f"{name}.py").write_text(text)
    return tmp_path


def compiled(environment: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in environment.rglob("*.pyc"))


def test_all_packages_are_compiled_once(environment: Path) -> None:
    assert compile_packages.main([], environment) == 0
    assert compiled(environment) == ["good"]
    next(environment.rglob("*.pyc")).unlink()
    assert compile_packages.main([], environment) == 0
    assert compiled(environment) == []


def test_compiling_ends_with_the_process_that_started_it(environment: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert beside(ended.pid, environment) == 1
    assert not (environment / ".compiled").exists()
    assert beside(os.getpid(), environment) == 0
    assert compiled(environment) == ["good"]


def beside(pid: int, environment: Path) -> int:
    """Runs in a separate process, since it lowers the priority."""
    program = (
        "import sys; from pathlib import Path; import compile_packages; "
        "sys.exit(compile_packages.main(sys.argv[1:2], Path(sys.argv[2])))"
    )
    folder = Path(compile_packages.__file__).parent
    command = [sys.executable, "-c", program, str(pid), str(environment)]
    return subprocess.run(command, cwd=folder).returncode
