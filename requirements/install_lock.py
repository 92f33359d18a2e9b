"""Installs a lock and this checkout into the environment of the Python that runs this:

    .venv/bin/python requirements/install_lock.py up

uv installs, in the version that uv.txt pins. It reads none of pip's settings, so it is told what
pip knows of indexes, proxies and certificates. Where uv cannot be had or fails, pip installs. The
CPU kernels are compiled meanwhile. Uses only the standard library and pip.
"""

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
KERNELS = ROOT / "engine/headrace_engine/kernels/cpu/build.py"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
# A setting of pip -> uv's variable of the same meaning.
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
}
# Sections of pip's settings that apply, the strongest last.
SECTIONS = ("global", "install", ":env:")


class NoUv(Exception):
    """uv is not available, or did not install; the message is its output."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("lock", help="a file in requirements/ without its .txt, such as up or dev")
    parser.add_argument("--all-kernels", action="store_true", help="not only those for this CPU")
    given = parser.parse_args(arguments)
    (Path(sys.prefix) / ".compiled").unlink(missing_ok=True)
    every = ["--all"] if given.all_kernels else []
    # It says itself what it lacks; engines do without kernels.
    with subprocess.Popen([sys.executable, str(KERNELS), *every], stdout=subprocess.DEVNULL):
        status = install("--require-hashes", "-r", str(LOCKS / f"{given.lock}.txt"))
    return status or install("--no-deps", "--no-build-isolation", "-e", str(ROOT))


def install(*packages: str) -> int:
    """Installs by uv, or else by pip; returns the exit status."""
    try:
        known = pip_settings()
        no_index = ["--no-index"] if known.get("no-index") else []
        command = [str(uv()), "pip", "install", "--quiet", "--python", sys.executable]
        run([*command, *no_index, *packages], {**os.environ, **uv_variables(known, os.environ)})
    except NoUv as error:
        sys.stderr.write(f"{error}\nuv does not install: pip does, which takes minutes longer\n")
        return subprocess.call([*PIP, "install", "--quiet", *packages])
    return 0


def uv(folder: Path = Path(sys.prefix) / "uv") -> Path:
    """The program in the version that is pinned; installs it where it is missing. Raises NoUv."""
    lock, installed = LOCKS / "uv.txt", folder / "installed.txt"
    if not installed.exists() or installed.read_bytes() != lock.read_bytes():
        options = ("--quiet", "--upgrade", "--target", str(folder), "--require-hashes")
        run([*PIP, "install", *options, "-r", str(lock)], os.environ)
        installed.write_bytes(lock.read_bytes())
    return folder / "bin/uv"


def run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs a command. Raises NoUv with its output if it fails."""
    try:
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise NoUv(str(error)) from error
    if done.returncode != 0:
        raise NoUv(done.stderr.strip())


def pip_settings() -> dict[str, str]:
    """Returns pip's settings from its files and its environment, by the names of its options."""
    done = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True)
    return strongest(done.stdout.splitlines())


def strongest(lines: Iterable[str]) -> dict[str, str]:
    """The values that apply, of lines such as `global.index-url='https://example.com/simple'`."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in lines:
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in found:
            found[section][option] = str(ast.literal_eval(value))
    return {option: value for section in SECTIONS for option, value in found[section].items()}


def uv_variables(settings: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """pip's settings as uv's variables; what the environment has for uv stays."""
    found = {
        VARIABLES[name]: uv_value(name, settings[name]) for name in VARIABLES if name in settings
    }
    if "UV_INDEX" in found:
        # As pip does, all indexes are asked; the hashes decide what may be installed.
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in found.items() if value and name not in environ}


def uv_value(name: str, value: str) -> str:
    """uv fails where pip warns: at folders that are not there."""
    if name != "find-links":
        return " ".join(value.split())
    return ",".join(each for each in value.split() if ":" in each or Path(each).is_dir())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
