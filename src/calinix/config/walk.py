"""Checks a tree of YAML nodes against the structs and collects every problem on the way.

msgspec stops at the first fault and knows no lines; this walks the same types with the nodes at
hand, so a file is judged whole. What comes out is plain data, and msgspec makes the structs of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec.inspect as mi
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from calinix.config.fields import MASK
from calinix.config.near import key_hint, paths_of_keys, value_hint
from calinix.config.source import Budget, Problem, entries

TAG = "tag:yaml.org,2002:"
NAMES = {"bool": "a boolean", "int": "a number", "float": "a number", "null": "nothing"}
TRUE, FALSE = {"true", "yes", "on"}, {"false", "no", "off"}
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]{0,300})")
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

MANY = 10**9
"""Bounds from here on only keep nonsense out, and are not worth telling."""

MISSING = object()


class Walker:
    """One pass over one file. `problems` and `lines` (path -> line) fill as it goes."""

    def __init__(self, root: mi.StructType, environ: Mapping[str, str]):
        self.problems: list[Problem] = []
        self.lines: dict[str, int] = {}
        self._root = root
        self._environ = environ
        self._budget = Budget()
        self._elsewhere = paths_of_keys(root)

    def walk(self, node: Node) -> dict[str, object]:
        """The file as plain data; what is wrong is left out of it and told in `problems`."""
        tree = self._value(self._root, node, "")
        return tree if isinstance(tree, dict) else {}

    def _wrong(self, node: Node, path: str, text: str) -> object:
        self.problems.append(Problem(node.start_mark.line + 1, 0, path, text))
        return MISSING

    def _mismatch(self, node: Node, path: str, kind: mi.Type, hint: str = "") -> object:
        secret = is_secret(kind)
        text = f"expected {expected(kind)}, found {found(node, secret=secret)}"
        if tag_of(node) == "!":
            hint = "tags (!name) are not supported"
        return self._wrong(node, path, f"{text}; {hint}" if hint else text)

    def _value(self, kind: mi.Type, node: Node, path: str) -> object:
        self._budget.spend(node)
        self.lines[path] = node.start_mark.line + 1
        bare = kind.type if isinstance(kind, mi.Metadata) else kind
        if isinstance(bare, mi.UnionType):
            return self._union(bare, node, path)
        if isinstance(bare, mi.StructType):
            return self._struct(bare, node, path)
        if isinstance(bare, mi.VarTupleType):
            return self._list(kind, bare, node, path)
        return self._scalar(kind, bare, node, path)

    def _union(self, kind: mi.UnionType, node: Node, path: str) -> object:
        """Null where it may be; a struct for a mapping; else the one type that is left."""
        members = [m for m in kind.types if not isinstance(m, mi.NoneType)]
        if len(members) < len(kind.types) and tag_of(node) == "null":
            return None
        structs = [m for m in members if isinstance(m, mi.StructType)]
        others = [m for m in members if not isinstance(m, mi.StructType)]
        if structs and (isinstance(node, MappingNode) or not others):
            return self._value(structs[0], node, path)
        return self._value(others[0], node, path)

    def _struct(self, kind: mi.StructType, node: Node, path: str) -> object:
        if not isinstance(node, MappingNode) or tag_of(node) != "map":
            hint = "its keys stand indented below it" if tag_of(node) == "null" else ""
            if {"id", "url"} <= {field.encode_name for field in kind.fields}:
                hint = hint or "write a pod as {id: NAME, url: 'http://HOST:PORT'}"
            return self._mismatch(node, path, kind, hint)
        fields = {field.encode_name: field for field in kind.fields}
        tree: dict[str, object] = {}
        seen: dict[str, int] = {}
        for entry in entries(node, self._budget):
            name, line, value = entry.key, entry.line, entry.value
            if not name:
                self.problems.append(Problem(line, 0, path, "expected a plain name as key"))
                continue
            below = f"{path}.{shorten(name)}" if path else shorten(name)
            if name in seen:
                if not entry.merged:
                    text = f"duplicate key (first on line {seen[name]})"
                    self.problems.append(Problem(line, 0, below, text))
                continue
            seen[name] = line
            if name not in fields:
                text = f"unknown key; {key_hint(name, fields, self._elsewhere)}"
                self.problems.append(Problem(line, 0, below, text))
                continue
            checked = self._value(fields[name].type, value, below)
            self.lines[below] = line
            if checked is not MISSING:
                tree[name] = checked
        for name, field in fields.items():
            if field.required and name not in seen:
                below = f"{path}.{name}" if path else name
                self._wrong(node, below, f"missing; expected {expected(field.type)}")
        return tree

    def _list(self, kind: mi.Type, bare: mi.VarTupleType, node: Node, path: str) -> object:
        if not isinstance(node, SequenceNode) or tag_of(node) != "seq":
            plain = isinstance(node, ScalarNode) and tag_of(node) == "str"
            return self._mismatch(node, path, kind, "write it as [...]" if plain else "")
        if len(node.value) < (bare.min_length or 0):
            return self._wrong(node, path, f"expected {expected(kind)}, found an empty list")
        items = (self._value(bare.item_type, n, f"{path}[{i}]") for i, n in enumerate(node.value))
        # A bad item keeps its place, so that the paths of those behind it stay true.
        return [None if item is MISSING else item for item in items]

    def _scalar(self, kind: mi.Type, bare: mi.Type, node: Node, path: str) -> object:
        if not isinstance(node, ScalarNode) or tag_of(node) == "!":
            return self._mismatch(node, path, kind)
        if isinstance(bare, mi.BoolType):
            return self._bool(kind, node, path)
        if isinstance(bare, mi.IntType | mi.FloatType):
            return self._number(kind, bare, node, path)
        if isinstance(bare, mi.LiteralType) and isinstance(bare.values[0], int):
            return self._number(kind, bare, node, path)
        return self._text(kind, bare, node, path)

    def _bool(self, kind: mi.Type, node: ScalarNode, path: str) -> object:
        word = node.value.lower()
        if tag_of(node) == "bool" and word in TRUE | FALSE:
            return word in TRUE
        hint = "remove the quotes" if word in TRUE | FALSE else ""
        return self._mismatch(node, path, kind, hint)

    def _number(
        self, kind: mi.Type, bare: mi.IntType | mi.FloatType | mi.LiteralType, node: Node, path: str
    ) -> object:
        tag, text = tag_of(node), str(node.value)
        number = number_of(text, whole=not isinstance(bare, mi.FloatType))
        if tag not in {"int", "float"}:
            quoted = number is not None and isinstance(node, ScalarNode) and node.style
            return self._mismatch(node, path, kind, "remove the quotes" if quoted else "")
        if number is None:
            odd = tag == "int" or ":" in text
            return self._mismatch(
                node, path, kind, "write it in plain decimal digits" if odd else ""
            )
        if isinstance(bare, mi.LiteralType):
            return number if number in bare.values else self._mismatch(node, path, kind)
        low, high = bare.ge, bare.le
        if (low is not None and number < low) or (high is not None and number > high):
            return self._mismatch(node, path, kind)
        return number

    def _text(self, kind: mi.Type, bare: mi.Type, node: ScalarNode, path: str) -> object:
        tag, text = tag_of(node), str(node.value)
        if isinstance(bare, mi.LiteralType):
            if tag == "str" and text in bare.values:
                return text
            hint = value_hint(text, [str(value) for value in bare.values])
            return self._mismatch(node, path, kind, hint)
        if tag != "str":
            # yes, 8080, 1.10 or 2026-01-01 without quotes are no text in YAML.
            read = NAMES.get(tag, "a date")
            hint = "" if tag == "null" else f"YAML reads it as {read}; put it in quotes"
            return self._mismatch(node, path, kind, hint)
        if is_secret(kind):
            return self._secret(kind, node, path)
        if not isinstance(bare, mi.StrType) or not text_fits(text, bare):
            near = near_values(kind)
            return self._mismatch(node, path, kind, value_hint(text, near) if near else "")
        return text

    def _secret(self, kind: mi.Type, node: ScalarNode, path: str) -> object:
        """The text with `${NAME}` taken from the environment. Nothing of it is ever told."""
        text = str(node.value)
        if "${" in VARIABLE.sub("", text):
            return self._wrong(node, path, "expected ${NAME}, found '${' without a name and '}'")
        names = VARIABLE.findall(text)
        for name in names:
            if not self._environ.get(name):
                state = "empty" if name in self._environ else "not set"
                return self._wrong(node, path, f"the environment variable {name} is {state}")
        value = VARIABLE.sub(lambda match: self._environ[match[1]], text)
        if not re.fullmatch(r"[!-~]{1,4096}", value):
            origin = f" (from {', '.join(names)})" if names else ""
            return self._wrong(node, path, f"expected {expected(kind)}, found {MASK}{origin}")
        return value


def tag_of(node: Node) -> str:
    """str, int, map ...; '!' for every tag that a configuration has no use for."""
    tag = node.tag.removeprefix(TAG)
    if tag in {"value", "merge"}:  # a plain = or <<
        return "str"
    return tag if tag in {*NAMES, "str", "timestamp", "map", "seq"} else "!"


def is_secret(kind: mi.Type) -> bool:
    """The value, or a list's items, must never be shown."""
    if isinstance(kind, mi.Metadata):
        return bool((kind.extra or {}).get("secret")) or is_secret(kind.type)
    return isinstance(kind, mi.VarTupleType) and is_secret(kind.item_type)


def near_values(kind: mi.Type) -> list[str]:
    """Words that a text may have been meant to be."""
    extra = kind.extra if isinstance(kind, mi.Metadata) else None
    return list((extra or {}).get("near", ()))


def expected(kind: mi.Type) -> str:
    """What may stand there, in words."""
    if isinstance(kind, mi.Metadata):
        words = (kind.extra or {}).get("expected")
        if is_secret(kind) and isinstance(kind.type, mi.StrType):
            words = "a key of printable characters without spaces"
        return str(words) if words else expected(kind.type)
    if isinstance(kind, mi.UnionType):
        members = [m for m in kind.types if not isinstance(m, mi.NoneType)]
        return " or ".join(expected(member) for member in members)
    if isinstance(kind, mi.LiteralType):
        values = [str(value) for value in kind.values]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if isinstance(kind, mi.IntType | mi.FloatType):
        name = "an integer" if isinstance(kind, mi.IntType) else "a number"
        if kind.le is None or kind.le >= MANY:
            return f"{name} of at least {kind.ge}"
        return f"{name} from {kind.ge:.15g} to {kind.le:.15g}"
    if isinstance(kind, mi.VarTupleType):
        return "a list with at least one entry" if kind.min_length else "a list"
    if isinstance(kind, mi.BoolType):
        return "true or false"
    return "a mapping" if isinstance(kind, mi.StructType) else "a text on one line"


def found(node: Node, *, secret: bool = False) -> str:
    """What stands there, short, in words."""
    if isinstance(node, MappingNode):
        return "a mapping"
    if isinstance(node, SequenceNode):
        return "a list"
    if tag_of(node) == "null":
        return "nothing"
    if secret:
        return MASK
    text = str(node.value)
    if "://" in text and "@" in text:
        return "a URL with a user"  # and perhaps a password
    return quoted(text) if tag_of(node) in {"str", "!"} else shorten(text)


def quoted(text: str, limit: int = 60) -> str:
    """In quotes, at most `limit` characters of it, escaped where it is not printable."""
    return repr(text if len(text) <= limit else f"{text[: limit - 3]}...")


def shorten(text: str, limit: int = 60) -> str:
    """At most `limit` characters, printable ones only."""
    clean = text if text.isprintable() else repr(text)[1:-1]
    return clean if len(clean) <= limit else f"{clean[: limit - 3]}..."


def number_of(text: str, *, whole: bool) -> int | float | None:
    """A finite decimal number, or None. 010 and 1:30 are numbers to YAML, but not to people."""
    if INTEGER.fullmatch(text):
        return int(text)
    if whole or not re.fullmatch(r"[-+]?[0-9_]*\.?[0-9_]*([eE][-+]?[0-9]{1,3})?", text):
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) <= 1e300 else None


def text_fits(text: str, kind: mi.StrType) -> bool:
    """Length, pattern, one line, printable."""
    low, high = kind.min_length or 0, kind.max_length
    return (
        len(text) >= low
        and (high is None or len(text) <= high)
        and text.isprintable()
        and (kind.pattern is None or re.search(kind.pattern, text) is not None)
    )
