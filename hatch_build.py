"""Build hook: compiles the engine's native kernels whenever the package is built or installed.

Without a working compiler it warns and continues: the engine then runs in plain torch, slower, and
the wheel stays pure. Wheels with kernels hold every instruction set of their architecture, an
editable installation those of this CPU.
"""

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("engine/headrace_engine/kernels/cpu")


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root) / KERNELS
        builder = _load_builder(folder)
        try:
            build = builder.build_for_this_cpu if version == "editable" else builder.build
            report = build(folder)
        except builder.BuildError as error:
            self.app.display_warning(f"headrace: native CPU kernels not built: {error}")
            self.app.display_warning("headrace: the engine will run on CPUs in plain torch, slower")
            return
        for name, reason in report.skipped.items():
            self.app.display_warning(f"headrace: no kernels for {name}: {reason}")
        build_data["artifacts"] += [f"/{KERNELS}/{path.name}" for path in report.libraries]
        build_data["pure_python"] = False
        # Plain C behind ctypes: any Python 3, but only this platform.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def _load_builder(folder: Path) -> ModuleType:
    """The kernels' own build module; the package itself cannot be imported at build time."""
    spec = importlib.util.spec_from_file_location("headrace_kernels_build", folder / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
