"""The nearest right word for a wrong one: keys and enum values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import msgspec.inspect as mi

SURE, LIKELY = 0.75, 0.6
SIMULATED = frozenset({"smgCacheAware", "dynamoCost", "llmdDefault", "aibrixPrefix", "clairvoyant"})
"""Names that `calinix simulate` takes for a strategy, and no gateway does."""


def nearest(word: str, choices: Iterable[str], cutoff: float = LIKELY) -> str | None:
    """The choice that `word` was most likely meant to be; case, `_` and `-` do not count."""
    by_plain = {_plain(choice): choice for choice in choices}
    found = difflib.get_close_matches(_plain(word[:64]), by_plain, n=1, cutoff=cutoff)
    return by_plain[found[0]] if found else None


def key_hint(word: str, keys: Iterable[str], elsewhere: dict[str, list[str]]) -> str:
    """What to say after `unknown key`: a near key here, the same key elsewhere, or all keys here.

    `elsewhere` maps each key of the schema to the paths that it stands at.
    """
    here = list(keys)
    near = nearest(word, here, SURE)
    if near is None and word in elsewhere:
        return f"did you mean {' or '.join(repr(path) for path in elsewhere[word][:2])}?"
    near = near or nearest(word, here)
    if near is not None:
        return f"did you mean {near!r}?"
    return f"the keys here are {', '.join(here)}"


def value_hint(word: str, values: Iterable[str]) -> str:
    """What to say of a word that is none of `values`; nothing where none is near."""
    if word in SIMULATED:
        return "that one is a baseline of `calinix simulate` only"
    choices = list(values)
    near = nearest(word, choices)
    if near is None:  # NixlConnector, for nixl
        near = next((one for one in choices if _plain(word).startswith(_plain(one))), None)
    return f"did you mean {near!r}?" if near else ""


def paths_of_keys(root: mi.Type) -> dict[str, list[str]]:
    """Key -> the dotted paths that it stands at in the schema."""
    found: dict[str, list[str]] = {}
    _collect(root, "", found)
    return found


def _collect(kind: mi.Type, path: str, found: dict[str, list[str]]) -> None:
    if isinstance(kind, mi.Metadata):
        _collect(kind.type, path, found)
    elif isinstance(kind, mi.UnionType):
        for member in kind.types:
            _collect(member, path, found)
    elif isinstance(kind, mi.VarTupleType):
        _collect(kind.item_type, f"{path}[]", found)
    elif isinstance(kind, mi.StructType):
        for field in kind.fields:
            below = f"{path}.{field.encode_name}" if path else field.encode_name
            found.setdefault(field.encode_name, []).append(below)
            _collect(field.type, below, found)


def _plain(word: str) -> str:
    return word.replace("_", "").replace("-", "").lower()
