"""Locks, licences and images: only chosen packages are installed, and their hashes are checked."""

import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from headrace_testing.locks import IMAGE_ENVIRONMENT, IMAGES, LOCKS, REQUIREMENTS, pins
from headrace_testing.pages import licenses

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RENEW = "run `make locks`"


def constraints() -> dict[str, str]:
    pairs = (line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    return {canonicalize_name(name): version for name, version in pairs}


def declared(*extras: str) -> list[Requirement]:
    """The requirements in pyproject.toml; extras of the project are replaced by their
    requirements."""
    found = [Requirement(line) for line in PROJECT["dependencies"]]
    wanted = list(extras)
    while wanted:
        for line in PROJECT["optional-dependencies"][wanted.pop()]:
            needed = Requirement(line)
            if needed.name == PROJECT["name"]:
                wanted += needed.extras
            else:
                found.append(needed)
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_of_a_lock_has_an_exact_version_and_hashes(lock: str) -> None:
    found = pins(lock)

    assert found
    bad = [
        pin.name
        for pin in found.values()
        if not pin.hashes or not all(re.fullmatch(r"sha256:[0-9a-f]{64}", h) for h in pin.hashes)
    ]
    assert bad == []


@pytest.mark.parametrize("lock", [lock for lock in LOCKS if lock not in ("tools", "uv")])
def test_a_lock_has_the_versions_of_the_constraints(lock: str) -> None:
    pinned = constraints()
    differ = {p.name: p.version for p in pins(lock).values() if pinned.get(p.name) != p.version}

    assert differ == {}, RENEW


def test_every_constraint_is_in_a_lock() -> None:
    locked = {name for lock in LOCKS for name in pins(lock)}

    assert constraints().keys() - locked == set(), "not used any more: remove it"


@pytest.mark.parametrize(
    ("lock", "extras"),
    [*((image, (image,)) for image in IMAGES), ("up", ("up",)), ("dev", ("dev", "sdks"))],
)
def test_a_lock_contains_the_declared_dependencies(lock: str, extras: tuple[str, ...]) -> None:
    found = pins(lock)
    missing = [
        str(needed)
        for needed in declared(*extras)
        if (pin := found.get(canonicalize_name(needed.name))) is None
        or not needed.specifier.contains(pin.version, prereleases=True)
    ]

    assert missing == [], RENEW


def test_the_extra_flash_attn_is_locked() -> None:
    """Its lock is installed into an environment that has the engine's packages."""
    (requirement,) = (Requirement(line) for line in PROJECT["optional-dependencies"]["flash-attn"])
    locked = pins("flash-attn")

    assert requirement.specifier.contains(locked[requirement.name].version)
    assert locked.keys().isdisjoint(pins("up")), "two locks would each install their own version"


@pytest.mark.parametrize("image", IMAGES)
def test_a_lock_has_exactly_the_needed_packages(image: str) -> None:
    """Checked with the requirements of the packages installed here: images are installed with
    `--no-deps`."""
    locked = {name for name, pin in pins(image).items() if pin.applies}

    assert locked == closure(declared(image)), RENEW


def closure(wanted: list[Requirement]) -> set[str]:
    """Names of all packages that these bring into an image for x86-64."""
    found: set[tuple[str, str]] = set()
    while wanted:
        needed = wanted.pop()
        name = canonicalize_name(needed.name)
        for extra in ("", *needed.extras):
            if (name, extra) not in found:
                found.add((name, extra))
                wanted += _needs(name, extra)
    return {name for name, _ in found}


def _needs(name: str, extra: str) -> list[Requirement]:
    try:
        lines = requires(name) or ()
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed here")
    environment = {**IMAGE_ENVIRONMENT, "extra": extra}
    every = (Requirement(line) for line in lines)
    return [each for each in every if each.marker is None or each.marker.evaluate(environment)]


@pytest.mark.parametrize("path", sorted(REQUIREMENTS.glob("*.txt")), ids=lambda path: path.stem)
def test_a_lock_names_no_index(path: Path) -> None:
    text = path.read_text()

    assert "://" not in text
    assert not re.search(r"^-", text, re.MULTILINE)


def test_the_list_of_licences_is_up_to_date() -> None:
    lines = licenses.PAGE.read_text().splitlines()
    listed = {line.split(" | ")[0].removeprefix("| "): line for line in lines if "| " in line}
    wrong = [name for name, row in licenses.rows().items() if listed.get(name) != row]

    assert wrong == [], "run `make generated`"
    assert listed.keys() - {"package", "---"} == licenses.packages().keys()


def test_no_image_ships_a_package_under_the_gpl_alone() -> None:
    refused = {
        name: found
        for name in licenses.packages()
        if (found := licenses.licence(name)) and licenses.is_gpl_only(found)
    }

    assert refused == {}


@pytest.mark.parametrize(
    ("found", "refused"),
    [
        ("GPL-3.0-or-later", True),
        ("MIT AND AGPL-3.0-only", True),
        ("GNU General Public License v3 (GPLv3)", True),
        ("GNU Affero General Public License v3", True),
        ("LGPL-3.0-only", False),
        ("GNU Lesser General Public License v3 (LGPLv3)", False),
        ("MIT OR GPL-2.0-only", False),
        ("GPL-2.0-only WITH Classpath-exception-2.0", False),
        ("Apache-2.0", False),
    ],
)
def test_licences_that_allow_only_the_gpl_are_recognised(found: str, refused: bool) -> None:
    assert licenses.is_gpl_only(found) is refused


def test_images_come_from_one_base_and_install_nothing_unchecked() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE))
    bases = set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) - stages
    installs = re.findall(r"pip (?:install|wheel) [^&\n]*", text)

    assert bases == {"${PYTHON_IMAGE}"}
    assert installs
    assert [i for i in installs if "--require-hashes" not in i and "--no-deps" not in i] == []


def test_an_image_for_cpus_has_no_packages_for_gpus(tmp_path: Path) -> None:
    text = (ROOT / "Dockerfile").read_text()
    (program,) = re.findall(r"awk '(.*?)'", text)
    lock = REQUIREMENTS / "engine.txt"
    command = ["awk", program, str(lock)]
    kept = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {line.split("==")[0] for line in kept.splitlines() if "==" in line}
    found = subprocess.run(
        ["grep", "-o", "^torch==[0-9.]*", str(lock)], capture_output=True, text=True, check=True
    )

    left_out = pins("engine").keys() - names
    assert {"torch", "triton"} <= left_out
    assert all(re.match("torch|triton|nvidia-|cuda-", name) for name in left_out)
    assert kept.count("--hash=") == sum(len(pins("engine")[name].hashes) for name in names)
    assert found.stdout.strip() == f"torch=={pins('engine')['torch'].version}"


def release(base: str, tag: str = "0.1.0") -> subprocess.CompletedProcess[str]:
    """Runs `make release-images` with builds that are only printed."""
    given = ("IMAGE_BUILD=echo", f"PYTHON_IMAGE={base}", f"TAG={tag}")
    return subprocess.run(
        ["make", "--no-print-directory", "release-images", *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("base", ["", "python:3.11-slim-bookworm", "python@sha256:12ab"])
def test_a_release_without_its_base_s_digest_is_refused(base: str) -> None:
    done = release(base)

    assert done.returncode != 0
    assert "a release needs its base by digest" in done.stdout


def test_a_release_is_built_on_the_base_with_the_given_digest() -> None:
    base = f"python:3.11-slim-bookworm@sha256:{'0' * 64}"
    built = release(base).stdout.splitlines()

    assert len(built) == 3
    assert all(f"--build-arg PYTHON_IMAGE={base}" in line for line in built)
    assert [line.split()[3] for line in built] == [
        *("headrace-gateway:0.1.0", "headrace-operator:0.1.0", "headrace-engine:0.1.0")
    ]
    assert "TAG is empty" in release(base, tag="").stdout
