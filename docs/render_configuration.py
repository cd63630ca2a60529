"""Renews the tables of docs/configuration.md from the configuration's structs.

    python docs/render_configuration.py

Keys, types, defaults and meanings are those of calinix.config.schema; what stands outside the
markers is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import msgspec.inspect as mi

from calinix.config import Config, PodConfig, Weights
from calinix.config.describe import field_docs

PAGE = Path(__file__).with_name("configuration.md")
KEYS = re.compile(r"(<!-- keys -->\n).*?(<!-- /keys -->)", re.DOTALL)
HEAD = "| key | type | default | meaning |\n|---|---|---|---|\n"
SHARED = {PodConfig: "A pod", Weights: "Weights"}
"""Structs that stand at several paths: each has a section of its own."""
MANY = 10**9
"""Bounds from here on only keep nonsense out."""


def render(page: str) -> str:
    """The page with its tables made anew."""
    return KEYS.sub(lambda match: match[1] + "\n" + tables() + "\n" + match[2], page)


def tables() -> str:
    """One table per top-level key, then one per shared struct."""
    parts = []
    root = struct_of(mi.type_info(Config))
    for field in root.fields:
        kind = bare(field.type)
        rows = list(rows_of(kind, field.encode_name)) if isinstance(kind, mi.StructType) else []
        docs = (
            kind.cls.__doc__ if isinstance(kind, mi.StructType) else field_docs(Config)[field.name]
        )
        if not rows:
            rows = [row_of(field, field.encode_name, docs or "")]
        parts.append(f"### {field.encode_name}\n\n{docs}\n\n{HEAD}" + "\n".join(rows))
    for cls, title in SHARED.items():
        rows = list(rows_of(struct_of(mi.type_info(cls)), ""))
        parts.append(f"### {title}\n\n{cls.__doc__}\n\n{HEAD}" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def rows_of(struct: mi.StructType, path: str) -> Iterator[str]:
    """A row per key, nested ones with their whole path."""
    docs = field_docs(struct.cls)
    for field in struct.fields:
        below = f"{path}.{field.encode_name}" if path else field.encode_name
        kind = bare(field.type)
        if isinstance(kind, mi.StructType) and kind.cls not in SHARED:
            if isinstance(field.type, mi.UnionType):
                yield row_of(field, below, docs[field.name])
            yield from rows_of(kind, below)
        else:
            yield row_of(field, below, docs[field.name])


def row_of(field: mi.Field, path: str, meaning: str) -> str:
    """One row of a table."""
    cells = (f"`{path}`", words(field.type), default_of(field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def bare(kind: mi.Type) -> mi.Type:
    """The struct where there may be one, else the type without null and metadata."""
    if isinstance(kind, mi.Metadata):
        return bare(kind.type)
    if isinstance(kind, mi.UnionType):
        kinds = [bare(member) for member in kind.types if not isinstance(member, mi.NoneType)]
        return next((k for k in kinds if isinstance(k, mi.StructType)), kinds[0])
    return kind


def struct_of(kind: mi.Type) -> mi.StructType:
    """The type, which is a struct."""
    found = bare(kind)
    assert isinstance(found, mi.StructType)
    return found


def words(kind: mi.Type) -> str:
    """The type, for people."""
    if isinstance(kind, mi.Metadata):
        extra = kind.extra or {}
        if "expected" in extra:
            return str(extra["expected"])
        return "secret" if extra.get("secret") else words(kind.type)
    if isinstance(kind, mi.UnionType):
        return " or ".join(words(k) for k in kind.types if not isinstance(k, mi.NoneType))
    if isinstance(kind, mi.StructType):
        title = SHARED.get(kind.cls)
        return f"[{title}](#{title.lower().replace(' ', '-')})" if title else "mapping"
    if isinstance(kind, mi.VarTupleType):
        return f"list of {words(kind.item_type)}"
    if isinstance(kind, mi.LiteralType):
        return ", ".join(f"`{value}`" for value in kind.values)
    if isinstance(kind, mi.IntType | mi.FloatType):
        name = "integer" if isinstance(kind, mi.IntType) else "number"
        if kind.le is None or kind.le >= MANY:
            return f"{name}, {kind.ge} or more"
        return f"{name}, {kind.ge} to {kind.le}"
    return "true or false" if isinstance(kind, mi.BoolType) else "text"


def default_of(field: mi.Field) -> str:
    """The default as YAML on one line."""
    if field.required:
        return "required"
    if isinstance(field.default_factory, type | type(lambda: 0)):
        return shown(msgspec.to_builtins(field.default_factory()))
    return shown(field.default)


def shown(value: object) -> str:
    """A value as YAML on one line; nothing for null."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return "`{" + ", ".join(f"{k}: {v:g}" for k, v in value.items()) + "}`"
    if isinstance(value, list | tuple):
        return "`[]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text("utf-8")), "utf-8")
