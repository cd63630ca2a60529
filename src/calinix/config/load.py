"""From a YAML file, or its text, to a Config: all problems at once, each with its line."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import cast

import msgspec
import msgspec.inspect as mi

from calinix.config.rules import Draft, broken_rules
from calinix.config.schema import Config
from calinix.config.source import (
    MAX_FILE_BYTES,
    SourceError,
    compose,
    config_error,
    decode,
)
from calinix.config.walk import Walker
from calinix.errors import ConfigError

SMALLEST = (
    "name another file, or write this one; the smallest is "
    "upstreams: {single: {pods: [{id: pod-1, url: 'http://localhost:8000'}]}}"
)


def load_config(
    path: str | os.PathLike[str], *, environ: Mapping[str, str] | None = None
) -> Config:
    """The configuration in the file at `path`; `${NAME}` comes from `environ` (os.environ).

    Raises ConfigError: the file cannot be read, or has problems.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        hint = f"; {SMALLEST}" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError([f"{name}: cannot be read: {reason}{hint}"]) from None
    return parse_config(data, name, environ=environ)


def parse_config(
    text: str | bytes, filename: str = "config.yaml", *, environ: Mapping[str, str] | None = None
) -> Config:
    """The configuration in `text`; `filename` is what problems are told under.

    Raises ConfigError.
    """
    walker = Walker(_root(), os.environ if environ is None else environ)
    try:
        root = compose(decode(text) if isinstance(text, bytes) else text)
        tree = walker.walk(root)
    except SourceError as error:
        raise config_error([*walker.problems, error.problem], filename) from None
    problems = walker.problems + broken_rules(Draft(tree, walker.lines))
    if problems:
        raise config_error(problems, filename)
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError([f"{filename}: {error}"]) from None


@functools.cache
def _root() -> mi.StructType:
    return cast("mi.StructType", mi.type_info(Config))
