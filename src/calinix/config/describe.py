"""The schema for machines: JSON Schema with the docstrings of the structs' fields."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from typing import Any, cast

import msgspec
import msgspec.inspect as mi

from calinix.config.fields import Base
from calinix.config.schema import Config

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the configuration file, with titles and descriptions."""
    schema = msgspec.json.schema(Config)
    for struct in structs():
        definition = schema["$defs"][struct.__name__]
        docs = field_docs(struct)
        for field in msgspec.structs.fields(struct):
            definition["properties"][field.encode_name]["description"] = docs[field.name]
    return {"$schema": DIALECT, "title": "Calinix configuration", **schema}


def structs() -> list[type[Base]]:
    """Every struct of the configuration, in the order in which they first stand in it."""
    found: dict[type[Base], None] = {}
    _collect(mi.type_info(Config), found)
    return list(found)


def _collect(kind: mi.Type, found: dict[type[Base], None]) -> None:
    if isinstance(kind, mi.Metadata):
        _collect(kind.type, found)
    elif isinstance(kind, mi.UnionType):
        for member in kind.types:
            _collect(member, found)
    elif isinstance(kind, mi.VarTupleType):
        _collect(kind.item_type, found)
    elif isinstance(kind, mi.StructType):
        found.setdefault(cast("type[Base]", kind.cls))
        for field in kind.fields:
            _collect(field.type, found)


@functools.cache
def field_docs(struct: type[Base]) -> dict[str, str]:
    """Field name -> the docstring under it, on one line; '' where the source is not at hand."""
    docs = dict.fromkeys(struct.__struct_fields__, "")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(struct)))
    except OSError:
        return docs
    body = cast("ast.ClassDef", tree.body[0]).body
    for field, text in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs
