"""What the structs of the configuration are made of: bounded types, and their base."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_COUNT = 1_000_000_000_000

PositiveInt = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Factor = Annotated[float, Meta(ge=0, le=1e9)]
Ms = Annotated[int, Meta(ge=1, le=86_400_000)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]
FileName = Annotated[
    str, Meta(min_length=1, max_length=4096, extra={"expected": "the name of a file"})
]
Url = Annotated[
    str, Meta(min_length=1, extra={"expected": "http://host:port or https://host:port"})
]
Path = Annotated[str, Meta(pattern=r"^/[!-~]*$", extra={"expected": "a path that begins with '/'"})]
PodId = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9._:-]{1,128}$",
        extra={"expected": "1 to 128 letters, digits or any of . _ : -"},
    ),
]
Secret = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=4096,
        extra={"secret": True},
        extra_json_schema={"writeOnly": True},
    ),
]
Mode = Literal["single", "dispatch"]

MASK = "***"
SECRET_FIELDS = frozenset({"api_key", "api_keys"})
SECRET_KEYS = frozenset({"apiKey", "apiKeys"})


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Frozen, strict, camelCase outside. `repr` never shows a secret."""

    def __repr__(self) -> str:
        shown = (
            f"{name}={MASK if name in SECRET_FIELDS and value else repr(value)}"
            for name in self.__struct_fields__
            for value in (getattr(self, name),)
        )
        return f"{type(self).__name__}({', '.join(shown)})"
