"""From the bytes of a YAML file to its nodes, within bounds, with every fault as a Problem."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from calinix.errors import ConfigError

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_NODES = 200_000
MAX_DEPTH = 32
MAX_PROBLEMS = 100

MERGE_TAG = "tag:yaml.org,2002:merge"


class Problem(msgspec.Struct, frozen=True, order=True):
    """One fault: where it is (1-based; 0: unknown), which key, and what is wrong with it."""

    line: int
    column: int
    path: str
    text: str

    def render(self, filename: str) -> str:
        """`config.yaml:12: gateway.stratgy: unknown key; did you mean 'strategy'?`."""
        where = f"{filename}:{self.line}" if self.line else filename
        if self.column:
            where += f":{self.column}"
        return ": ".join(filter(None, (where, self.path, self.text)))


def config_error(problems: list[Problem], filename: str) -> ConfigError:
    """The error that tells of all problems, in the order of the file."""
    lines = [problem.render(filename) for problem in sorted(set(problems))]
    if len(lines) > MAX_PROBLEMS:
        more = len(lines) - MAX_PROBLEMS
        lines[MAX_PROBLEMS:] = [f"{filename}: and {more} more problems"]
    return ConfigError(lines)


class SourceError(Exception):
    """The text is no YAML that can be looked into further."""

    def __init__(self, text: str, line: int = 0, column: int = 0):
        self.problem = Problem(line, column, "", text)
        super().__init__(text)


def decode(data: bytes) -> str:
    """UTF-8 with or without a byte order mark. Raises SourceError."""
    if len(data) > MAX_FILE_BYTES:
        raise SourceError(f"larger than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SourceError(f"not UTF-8 text (byte 0x{data[error.start]:02x})", line) from None


def compose(text: str) -> Node:
    """The root node of the one document in `text`. Raises SourceError."""
    if len(text) > MAX_FILE_BYTES:
        raise SourceError(f"larger than {MAX_FILE_BYTES} characters")
    loader = None
    try:
        loader = _Composer(text.removeprefix("\ufeff"))
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        raise SourceError(f"not valid YAML: {_reason(error)}", *at) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SourceError(
            f"not valid YAML: the character {ord(_char(error.character)):#06x} is not allowed", line
        ) from None
    except (ValueError, OverflowError):
        # PyYAML lets them through for an escape beyond Unicode and for an endless %YAML version.
        line = loader.get_mark().line + 1 if loader else 0
        raise SourceError(
            "not valid YAML: a character or number that is out of range", line
        ) from None
    if root is None:
        raise SourceError("expected a mapping with upstreams in it, found nothing", 1)
    return root


class _Composer(yaml.SafeLoader):
    """PyYAML's composer with bounds on the number of nodes and on nesting, which it recurses by."""

    def __init__(self, text: str):
        super().__init__(text)
        self.count = 0
        self.depth = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        """One node and all below it."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self.count += 1
        if self.count > MAX_NODES:
            raise SourceError(f"more than {MAX_NODES} values", mark.line + 1)
        if self.depth >= MAX_DEPTH:
            raise SourceError(f"nested more than {MAX_DEPTH} deep", mark.line + 1)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _char(character: str | int) -> str:
    return character if isinstance(character, str) else chr(character)


def _reason(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's own words, made plain where they are not.

    The text of an alias or a tag is left out: it might be a secret that was not quoted.
    """
    problem = error.problem or error.context or "it cannot be read"
    if "'\\t'" in problem:
        return "a tab in the indentation; use spaces"
    if "but got '{'" in problem:
        return f"{problem}; inside [...] and {{...}} put ${{NAME}} in quotes"
    if "undefined alias" in problem:
        return "an alias (*name) without an anchor (&name); put text that begins with * in quotes"
    if "duplicate anchor" in (error.context or ""):
        return "two anchors with one name"
    if "tag" in problem and "could not" not in problem and "'" in problem:
        return "a tag (!name) that is not known; put text that begins with ! in quotes"
    if "another document" in problem:
        return "a second document (---); expected one"
    if "unexpected end of stream" in problem or "<stream end>" in problem:
        opened = f" ({error.context})" if error.context else ""
        return f"the file ends too early{opened}"
    return problem


class Entry(msgspec.Struct, frozen=True):
    """One key of a mapping with its value."""

    key: str
    line: int
    value: Node
    merged: bool = False
    """It came in by `<<`: an own key of the mapping wins over it."""


class Budget:
    """How many values a file may expand to, aliases and merges counted each time they are met."""

    def __init__(self, values: int = MAX_NODES):
        self.left = values

    def spend(self, node: Node) -> None:
        """Count one more. Raises SourceError."""
        self.left -= 1
        if self.left < 0:
            line = node.start_mark.line + 1
            raise SourceError(f"more than {MAX_NODES} values by aliases and merges", line)


def entries(node: MappingNode, budget: Budget, depth: int = 0) -> Iterator[Entry]:
    """Keys and values of a mapping, its own first, then those merged by `<<`.

    A key that is no plain text comes as ''. Raises SourceError.
    """
    if depth >= MAX_DEPTH:
        raise SourceError("merges (<<) nested too deep, or in a circle", node.start_mark.line + 1)
    merges: list[Node] = []
    for key, value in node.value:
        budget.spend(key)
        if key.tag == MERGE_TAG:
            merges += value.value if isinstance(value, SequenceNode) else [value]
        else:
            name = key.value if isinstance(key, ScalarNode) else ""
            yield Entry(name, key.start_mark.line + 1, value, depth > 0)
    for merge in merges:
        budget.spend(merge)
        if not isinstance(merge, MappingNode):
            raise SourceError("<< expects a mapping (*name)", merge.start_mark.line + 1)
        yield from entries(merge, budget, depth + 1)
