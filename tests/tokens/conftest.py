"""Fixtures of all tests of exact tokens over sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import hfkit
from calinix.edge.hf_folder import load_folder
from calinix.edge.tokenizers import HfTokenizer
from tokenkit import Gate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's tokenizer."""
    return hfkit.make_folder(tmp_path_factory.mktemp("model"), "chatml")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HfTokenizer:
    """The same, as a pod has it."""
    return HfTokenizer(load_folder(str(folder)))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate that is open, until a test shuts it."""
    found = Gate(monkeypatch)
    yield found
    found.open.set()
