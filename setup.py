"""Builds the compiled parts where there is a C compiler; without one the package still installs.

What begins with `_` is Cython. HOT is the request path: the same .py files, compiled by mypyc, so
that it is fast where it is installed and runs from its source in an editable install, where nothing
goes stale. All of HOT is compiled or nothing of it.
"""

import os
import sys
from subprocess import CalledProcessError

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, ExecError

HOT = """
    core/admission core/calibration core/canonical core/choice core/costs core/explain core/filters
    core/health core/ledger core/means core/observe core/outlook core/peer_records core/peers
    core/pickers core/pipeline core/plans core/pods core/prepare core/prompt core/rates
    core/recorded core/replicas core/requests core/router core/scorers core/sessions core/state
    core/transfers
    edge/http_client edge/http_request edge/http_response edge/http_server edge/http_strict
    edge/http_wire
    engines/json_edits engines/legs engines/plain engines/protocols engines/sglang engines/usage
    gateway/dispatch gateway/heads gateway/outbox gateway/proxy gateway/records gateway/server
    gateway/sides gateway/upstreams gateway/waiting
    telemetry/counters telemetry/record telemetry/telemetry
""".split()  # noqa: SIM905
GROUP = "calinix._hot"
BUILDING = {"bdist_wheel", "build", "install"}
"""Commands that compile it. An editable install and `build_ext --inplace` are none of them: beside
the sources it would go stale."""


def hot_extensions() -> list[Extension]:
    """The request path's extensions, its library first; none where they cannot be made."""
    if os.environ.get("CALINIX_PURE") or not BUILDING & set(sys.argv):
        return []
    flags = ["--config-file=", "--ignore-missing-imports"]
    try:
        from mypyc.build import mypycify  # noqa: PLC0415

        found = mypycify(
            flags + [f"src/calinix/{name}.py" for name in HOT],
            opt_level="2",
            debug_level="0",
            group_name=GROUP,
        )
    except (ImportError, SystemExit) as error:
        print(f"the request path stays Python: {error}", file=sys.stderr)
        return []
    for extension in found:
        extension.optional = True
        extension.extra_compile_args += LINKING
    return sorted(found, key=lambda extension: not is_library(extension))


LINKING = [] if sys.platform == "win32" else ["-fvisibility=hidden", "-fno-plt"]
"""Calls within the library are direct ones: what it exports are its modules' entries alone."""


def is_library(extension: Extension) -> bool:
    """Whether this is the one that holds the code; each other one only names a module of it."""
    return extension.name.startswith(GROUP)


class AllOrNone(build_ext):
    """Leaves out every module of the request path where its library cannot be built."""

    def build_extension(self, ext: Extension) -> None:
        """Builds one of them."""
        if ext in hot and not is_library(ext) and not self.library_is_built():
            return
        try:
            super().build_extension(ext)
        except (CCompilerError, ExecError, CompileError, OSError, CalledProcessError) as error:
            print(f"{ext.name} stays Python: {error}", file=sys.stderr)

    def library_is_built(self) -> bool:
        """Whether the library is there."""
        return any(
            is_library(ext) and os.path.exists(self.get_ext_fullpath(ext.name)) for ext in hot
        )


FLAGS = ["-O3", "-fno-strict-aliasing", "-ffp-contract=off"]
native = [
    Extension(name, [f"src/{name.replace('.', '/')}.pyx"], extra_compile_args=FLAGS, optional=True)
    for name in (
        "calinix.core._native",
        "calinix.edge._bytes_path",
        "calinix.engines._members",
        "calinix.engines._usage",
    )
]
hot = hot_extensions()
setup(
    ext_modules=[*cythonize(native, language_level=3), *hot],
    cmdclass={"build_ext": AllOrNone},
)
