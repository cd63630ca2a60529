"""The house rules, held by reading the source: directions, bounds, docstrings, words.

Each rule is one function that yields faults, one line of RULES that says where it holds, and one
piece of bad code that it must catch.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

FLOORS: tuple[tuple[str, ...], ...] = (  # ground first: a part imports its own floor and below
    ("errors", "headers"),
    ("config", "telemetry"),
    ("control",),
    ("core",),
    ("engines",),
    ("edge",),
    ("gateway", "extproc", "sim"),
    ("app", "bench"),
    ("cli",),
)
FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
HOSTS = {"gateway", "extproc", "sim"}
PURE = {"core", "control", "engines"}
IMPURE = {
    "aiohttp", "asyncio", "concurrent", "datetime", "http.client", "http.server", "httptools",
    "httpx", "logging", "multiprocessing", "numpy.random", "os", "prometheus_client", "random",
    "redis", "requests", "secrets", "select", "selectors", "signal", "socket", "ssl", "structlog",
    "subprocess", "threading", "time", "urllib.request", "uuid", "uvloop", "zmq",
}  # fmt: skip
MAX_FUNCTION_LINES, MAX_FILE_LINES, MAX_COLUMNS = 60, 400, 100

LONG_FILES = {  # state machines that splitting would hide
    "src/calinix/core/_native.pyx": "one extension module is one file; its parts are inlined",
    "src/calinix/edge/http_client.py": "one state machine: a connection to a pod",
    "src/calinix/edge/http_server.py": "one state machine: a client's connection",
    "src/calinix/gateway/proxy.py": "one state machine: a request on its way",
}
BOUNDARIES = {  # host callbacks that catch everything, so that the process lives
    "src/calinix/edge/http_server.py": {"_call_handler"},
    "src/calinix/edge/hf_folder.py": {"_load_tokenizer"},  # its library raises nothing narrower
}
ENTRY_POINTS = {"calinix", "calinix.cli", "calinix.__main__"}

WORDS = {
    r"\b(TODO|FIXME|XXX)\b": "finish it, or write it down where work is kept",
    r"/work/(main|shared)|/tmp/team|(?<![\w.])/root/|/home/\w": "a machine's own path",
    r"index-url[ =]+\S*://|\bpypi\.|pythonhosted": "a registry's host",
    r"pytest\.(mark\.)?(skip|xfail)": "a test runs, or is not there",
}
TEXT = {
    ".c", ".cfg", ".css", ".h", ".html", ".js", ".json", ".lock", ".md", ".py", ".pyi", ".pyx",
    ".service", ".sh", ".toml", ".yaml", ".yml",
}  # fmt: skip
SKIPPED = {".venv", ".git", "build", "dist", "_bytes_path.c", "_members.c", "_native.c", "_usage.c"}


class Source(NamedTuple):
    """One file: `name` is relative to the root, `tree` is empty where it is not Python."""

    name: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Dotted name of a file in src, else empty."""
        if not self.name.startswith("src/"):
            return ""
        return self.name[4:].rsplit(".", 1)[0].replace("/", ".").removesuffix(".__init__")

    @property
    def part(self) -> str:
        """The part of the house that the file belongs to."""
        return part_of(self.module)


Rule = Callable[[Source], Iterator[tuple[int, str]]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def source(name: str, text: str) -> Source:
    """A Source from its text."""
    is_python = name.endswith((".py", ".pyi"))
    return Source(name, text, ast.parse(text) if is_python else ast.Module([], []))


@pytest.fixture(autouse=True, scope="module")
def read_once() -> Iterator[None]:
    """Millions of nodes of syntax trees are in nobody's way when this module's tests have run."""
    yield
    sources.cache_clear()
    modules.cache_clear()


@functools.cache
def sources() -> tuple[Source, ...]:
    """Every text file of the project."""
    folders = ("src", "tests", "benchmarks", "docs", "examples", ".ci")
    found = [p for p in ROOT.iterdir() if p.is_file()]
    found += [p for folder in folders for p in (ROOT / folder).rglob("*") if p.is_file()]
    kept = [
        p
        for p in found
        if (p.suffix in TEXT or p.name in {"Makefile", "run"})
        and not SKIPPED.intersection(p.relative_to(ROOT).parts)
        and "egg-info" not in str(p)
    ]
    return tuple(source(str(p.relative_to(ROOT)), p.read_text("utf-8")) for p in sorted(kept))


@functools.cache
def modules() -> dict[str, Source]:
    """Module name -> file, for everything in src that can be imported."""
    return {s.module: s for s in sources() if s.name.startswith("src/")}


def part_of(module: str) -> str:
    """`calinix.core.index` -> core; `calinix.config_load` -> config; the package itself -> cli."""
    names = module.split(".")[1:]
    if not names or any(n in {"cli", "__main__"} or n.startswith("cli_") for n in names):
        return "cli"
    return next((p for p in ("app", "config") if names[0].startswith(f"{p}_")), names[0])


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import; `from a import b` gives a.b where that is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_module = full in modules() or full in IMPURE
                yield node.lineno, full if is_module else base


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function and method, nested ones too."""
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def imports_point_down(file: Source) -> Iterator[tuple[int, str]]:
    """A part imports only its own floor and those below; hosts never import each other."""
    if file.part not in FLOOR_OF:
        yield 1, f"`{file.part}` has no floor: give it one in FLOORS"
        return
    for line, name in imports(file.tree):
        target = part_of(name)
        if not name.startswith("calinix.") or target == file.part:
            continue
        if FLOOR_OF.get(target, 99) > FLOOR_OF[file.part]:
            yield line, f"{file.part} is below {target} and must not import {name}"
        elif {target, file.part} <= HOSTS:
            yield line, f"hosts do not know each other: {file.part} imports {name}"


def pure_parts_do_no_io(file: Source) -> Iterator[tuple[int, str]]:
    """core, control and engines have no clock, no rng, no I/O and no log of their own."""
    if file.part not in PURE:
        return
    found = list(imports(file.tree))
    found += [
        (n.lineno, "numpy.random")
        for n in ast.walk(file.tree)
        if isinstance(n, ast.Attribute) and ast.unparse(n) in {"np.random", "numpy.random"}
    ]
    for line, name in found:
        words = name.split(".")
        if IMPURE.intersection(".".join(words[:k]) for k in range(1, len(words) + 1)):
            yield line, f"{file.part} is pure: {name} is handed in or done by a host"


def functions_are_short(file: Source) -> Iterator[tuple[int, str]]:
    """Functions are at most MAX_FUNCTION_LINES long."""
    for node in functions(file.tree):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield node.lineno, f"{node.name}: {lines} lines, at most {MAX_FUNCTION_LINES}"


def files_are_short(file: Source) -> Iterator[tuple[int, str]]:
    """Files are at most MAX_FILE_LINES long, LONG_FILES excepted."""
    lines = file.text.count("\n")
    if lines > MAX_FILE_LINES and file.name not in LONG_FILES:
        yield lines, f"{lines} lines, at most {MAX_FILE_LINES}: split it, or say why in LONG_FILES"


def lines_are_short(file: Source) -> Iterator[tuple[int, str]]:
    """Lines are at most MAX_COLUMNS wide."""
    for number, line in enumerate(file.text.splitlines(), 1):
        if len(line) > MAX_COLUMNS:
            yield number, f"{len(line)} columns, at most {MAX_COLUMNS}"


def modules_say_what_they_hold(file: Source) -> Iterator[tuple[int, str]]:
    """Every module opens with a docstring and holds something."""
    if not ast.get_docstring(file.tree):
        yield 1, "open the module by saying what it holds"
    rest = file.tree.body[1:]
    if not file.name.endswith("__init__.py") and all(
        isinstance(node, ast.Import | ast.ImportFrom) for node in rest
    ):
        yield 1, "a file appears with its first behaviour, never empty"


def public_things_are_documented(file: Source) -> Iterator[tuple[int, str]]:
    """Public classes, functions and methods have docstrings."""
    bodies: list[ast.Module | ast.ClassDef] = [file.tree]
    for body in bodies:
        for node in body.body:
            if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
                continue
            marks = {ast.unparse(mark) for mark in node.decorator_list}
            if not ast.get_docstring(node) and not marks & {"override", "overload"}:
                yield node.lineno, f"{node.name} is public: give it a docstring"
            if isinstance(node, ast.ClassDef):
                bodies.append(node)


def each_test_says_what_it_proves(file: Source) -> Iterator[tuple[int, str]]:
    """Every test function has a docstring."""
    for node in functions(file.tree):
        if node.name.startswith("test_") and not ast.get_docstring(node):
            yield node.lineno, f"{node.name}: say in one line what it proves"


def everything_is_caught_only_at_boundaries(file: Source) -> Iterator[tuple[int, str]]:
    """`except Exception` (or wider) stands only in the functions of BOUNDARIES."""
    allowed = BOUNDARIES.get(file.name, set())
    inside = {n: f.name for f in functions(file.tree) for n in ast.walk(f)}
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = (
            {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {""}
        )
        if caught & {"", "Exception", "BaseException"} and inside.get(node) not in allowed:
            yield node.lineno, "catch what you expect; only the callbacks in BOUNDARIES catch all"


def only_the_cli_prints(file: Source) -> Iterator[tuple[int, str]]:
    """`print` belongs to the command line."""
    if file.part == "cli":
        return
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            yield node.lineno, "print stands only in cli modules; hosts log"


def words_are_fit_to_publish(file: Source) -> Iterator[tuple[int, str]]:
    """No unfinished marks, no machine's paths, no registry's hosts."""
    for pattern, why in WORDS.items():
        for match in re.finditer(pattern, file.text):
            yield file.text.count("\n", 0, match.start()) + 1, f"{match.group()!r}: {why}"


SRC_PY, TEST_PY, ANY_PY = r"src/.*\.py", r"tests/.*\.py", r"(src|tests|benchmarks)/.*\.py"
RULES: dict[Rule, tuple[str, str, str]] = {  # rule: (files it speaks of, a bad file, its text)
    imports_point_down: (SRC_PY, "src/calinix/core/x.py", "import calinix.edge.http_server"),
    pure_parts_do_no_io: (SRC_PY, "src/calinix/control/x.py", "from time import monotonic"),
    functions_are_short: (ANY_PY, "src/x.py", "def f():\n" + "    pass\n" * 60),
    files_are_short: (r"(src|tests|benchmarks)/.*\.(py|pyx|pyi)", "src/x.py", "x = 1\n" * 401),
    lines_are_short: (r"(src|tests|benchmarks)/.*\.(py|pyx|pyi)", "src/x.pyx", "x" * 101),
    modules_say_what_they_hold: (ANY_PY, "src/x.py", "import ast"),
    public_things_are_documented: (SRC_PY, "src/x.py", "class A:\n  '''A.'''\n  def f(s): ..."),
    each_test_says_what_it_proves: (TEST_PY, "tests/x.py", "def test_a(): ..."),
    everything_is_caught_only_at_boundaries: (
        SRC_PY, "src/x.py", "try:\n  f()\nexcept (OSError, Exception):\n  g()",
    ),
    only_the_cli_prints: (SRC_PY, "src/calinix/edge/x.py", "print(1)"),
    words_are_fit_to_publish: (r"(?!tests/test_house).*", "docs/x.md", "Later: FIXME"),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule: Rule) -> None:
    """The rule holds in every file that it speaks of."""
    files = [s for s in sources() if re.fullmatch(RULES[rule][0], s.name)]
    faults = [f"{s.name}:{line}: {fault}" for s in files for line, fault in rule(s)]
    assert files
    assert not faults, "\n".join([rule.__doc__ or "", *faults])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_catches_what_breaks_it(rule: Rule) -> None:
    """A rule that cannot fail holds nothing: each finds the fault in a file that breaks it."""
    scope, name, text = RULES[rule]
    assert re.fullmatch(scope, name)
    assert list(rule(source(name, text)))


def test_every_exception_to_a_rule_is_used() -> None:
    """LONG_FILES and BOUNDARIES name only files and functions that are there and need it."""
    by_name = {s.name: s for s in sources()}
    stale = [n for n in LONG_FILES if by_name[n].text.count("\n") <= MAX_FILE_LINES]
    for name, allowed in BOUNDARIES.items():
        stale += [f"{name}: {f}" for f in allowed - {f.name for f in functions(by_name[name].tree)}]
    assert not stale


def test_every_module_is_reached_from_an_entry_point() -> None:
    """No dead files: each module is imported, directly or not, by what users start or import."""
    reached, waiting = set[str](), list(ENTRY_POINTS & modules().keys())
    while waiting:
        name = waiting.pop()
        if name in reached or name not in modules():
            continue
        reached.add(name)
        tree = modules()[name].tree
        named = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
        lazy = [v.split(":")[0] for v in named if isinstance(v, str) and v.startswith("calinix.")]
        for target in [*(t for _, t in imports(tree)), *lazy]:
            words = target.split(".")
            waiting += [".".join(words[:k]) for k in range(1, len(words) + 1)]
    dead = sorted(modules().keys() - reached)
    assert not dead, f"imported by nothing that is started: {dead}"


def test_no_import_cycles() -> None:
    """Modules can be read in one order, from the ground up; type-only imports excepted."""
    graph: dict[str, set[str]] = {}
    for name, file in modules().items():
        body = [
            n for n in file.tree.body if not (isinstance(n, ast.If) and "TYPE_CH" in ast.dump(n))
        ]
        targets = {t for _, t in imports(ast.Module(body, []))} & modules().keys()
        graph[name] = targets - {name}
    graphlib.TopologicalSorter(graph).prepare()
