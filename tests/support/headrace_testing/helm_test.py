"""The script of `helm test`, run as in its pod."""

import asyncio
import sys

from .charts import CHART

SCRIPT = CHART / "files" / "helm_test.py"


async def helm_test(url: str, **environment: str) -> tuple[int | None, str]:
    """Runs the script; returns its exit status and its output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(SCRIPT)),
        env={"HEADRACE_URL": url, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, output.decode()
