"""The engine's image as its pod sees it, on the null CUDA device: user 10001, a root filesystem
that is only read, and tmpfs at /tmp and the cache folder. By hand, as root:

    PYTHONPATH=engine:common:tests/support python -m headrace_testing.image_root ROOT

ROOT is the root filesystem of the image, as `buildah mount` or `podman image mount` shows it.
Prints the image's size and the seconds from an engine's start until it is ready, as JSON.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .null_cuda import LIBRARY, build
from .valkey import ValkeyServer, free_port

CACHE = "var/cache/headrace"
# Runs in its own namespaces, so that no mounts are left.
ENTER = """
set -e
root=$1 given=$2 hidden=$3; shift 3
mount --bind "$root" "$root" && mount -o remount,ro,bind "$root"
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs -o uid=10001,gid=10001 tmpfs "$root/var/cache/headrace"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mkdir "$root/tmp/given" && mount --bind "$given" "$root/tmp/given"
[ -z "$hidden" ] || mount -t tmpfs tmpfs "$root$hidden"
exec chroot --userspec=10001:10001 "$root" /usr/bin/env -i "$@"
"""
READY_S = 600.0


def environment() -> dict[str, str]:
    """The environment that the Dockerfile sets for the engine."""
    return {
        "PATH": "/opt/headrace/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": f"/{CACHE}",
        "XDG_CACHE_HOME": f"/{CACHE}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": f"/{CACHE}/triton",
        "TRITON_CACHE_MANAGER": "headrace_engine.kernels.triton.shipped:ShippedFirst",
        "LD_PRELOAD": f"/tmp/given/{LIBRARY}",
        "TRITON_LIBCUDA_PATH": "/tmp/given",
    }


def inside(
    root: Path,
    given: Path,
    command: Sequence[str],
    variables: Mapping[str, str],
    hidden: str = "",
) -> list[str]:
    """Returns the command that runs `command` inside `root`.

    `given` is mounted at /tmp/given; the folder `hidden` appears empty.
    """
    pairs = [f"{name}={value}" for name, value in variables.items()]
    enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", ENTER, "enter"]
    return [*enter, str(root), str(given), hidden, *pairs, *command]


@contextmanager
def device() -> Iterator[Path]:
    """A folder with the null CUDA library, readable by the image's user."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        build(folder)
        decode = Path(__file__).with_name("decode.py")
        shutil.copy(decode, folder / "decode.py")
        yield folder


def size(root: Path) -> int:
    """The size of a root filesystem's files in bytes."""
    done = subprocess.run(["du", "-sxb", str(root)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def seconds_to_ready(root: Path) -> float:
    """Seconds from the start of an engine of the demo model until it is ready."""
    port = free_port()
    with device() as given, tempfile.TemporaryDirectory() as data:
        redis = ValkeyServer(Path(data), appendonly=False)
        redis.start()
        variables = {
            **environment(),
            "HEADRACE_ENGINE_REDIS_URL": redis.url,
            "HEADRACE_ENGINE_MODEL": "headrace-demo",
            "HEADRACE_ENGINE_DEVICE": "cuda",
            "HEADRACE_ENGINE_METRICS_PORT": str(port),
        }
        begun = time.monotonic()
        command = inside(root, given, ["python", "-m", "headrace_engine"], variables)
        process = subprocess.Popen(command, start_new_session=True)
        try:
            _until_ready(process, f"http://127.0.0.1:{port}/health/ready")
            return time.monotonic() - begun
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            redis.kill()


def _until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the engine ended with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"the engine is not ready after {READY_S:.0f} s")


def main() -> None:
    root = Path(sys.argv[1])
    found = {"bytes": size(root), "seconds to ready": round(seconds_to_ready(root), 1)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
