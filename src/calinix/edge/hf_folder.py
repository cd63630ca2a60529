"""A model's tokenizer as its folder has it: tokenizer.json, its configuration, chat templates.

What engines make of the folder's further files is done here too: added tokens that only
tokenizer_config.json names, named special tokens, templates in files of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken as LibraryToken
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from calinix.core.segments import AddedToken
from calinix.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
_MODEL_FILE = "config.json"
_CONFIG_FILE = "tokenizer_config.json"
_SPECIAL_FILE = "special_tokens_map.json"
_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_FOLDER = "additional_chat_templates"
_OLD_TEMPLATE_FILE = "chat_template.json"
_MAX_FILE_BYTES = 268_435_456
_NAMED = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What Qwen's tokenizers take as one word."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class HfFolder(msgspec.Struct, frozen=True):
    """What is read from a folder."""

    path: str
    """The file with the tokenizer."""
    tokenizer: Tokenizer
    added: list[AddedToken]
    """Its added tokens."""
    special_tokens: dict[str, str]
    """What templates know as `bos_token`, `eos_token` ...: only those that there are."""
    templates: dict[str, str]
    """Chat templates by name; `default` is for chats without tools of their own template."""


def load_folder(path: str) -> HfFolder:
    """Reads a folder, or the folder that a tokenizer.json is in. Raises ConfigError."""
    file = Path(path)
    if file.is_dir():
        file /= TOKENIZER_FILE
    if not file.is_file():
        raise ConfigError([f"no {TOKENIZER_FILE} in {path}: it is what `hf:` reads"])
    folder = file.parent
    config = _read_json(folder / _CONFIG_FILE)
    if "added_tokens_decoder" not in config:
        config = {**config, **_read_json(folder / _SPECIAL_FILE)}
    tokenizer = _load_tokenizer(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    if _is_qwen(folder, config):
        _rebuild_as_qwen(tokenizer)
    special = {name: text for name in _NAMED if (text := _content(config.get(name)))}
    _add_missing(tokenizer, config, special)
    return HfFolder(
        path=str(file),
        tokenizer=tokenizer,
        added=[] if tokenizer.encode_special_tokens else _added_tokens(tokenizer),
        special_tokens=special,
        templates=_templates(folder, config),
    )


def _read_json(file: Path) -> dict[str, Any]:
    """An object; empty where there is no such file."""
    try:
        found = msgspec.json.decode(_read(file))
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise ConfigError([f"{file}: not JSON: {error}"]) from None
    if not isinstance(found, dict):
        raise ConfigError([f"{file}: expected a JSON object"])
    return found


def _read(file: Path) -> bytes:
    """The bytes of a file. Raises FileNotFoundError, ConfigError."""
    try:
        with open(file, "rb") as stream:
            data = stream.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror or error}"]) from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError([f"{file}: larger than {_MAX_FILE_BYTES} bytes"])
    return data


def _load_tokenizer(file: Path) -> Tokenizer:
    data = _read(file)
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise ConfigError([f"{file}: not a tokenizer: {error}"]) from None


def _is_qwen(folder: Path, config: dict[str, Any]) -> bool:
    named = config.get("tokenizer_class")
    kind = named.removesuffix("Fast") if isinstance(named, str) else ""
    return kind == "Qwen2Tokenizer" or _read_json(folder / _MODEL_FILE).get("model_type") == "qwen2"


def _rebuild_as_qwen(tokenizer: Tokenizer) -> None:
    """Engines take only vocabulary and merges from such a file (transformers 5).

    How words are told apart is the class's own affair, whatever the file says of it.
    """
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _content(token: object) -> str:
    """The text of a token, which is a text or an object with one."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _add_missing(tokenizer: Tokenizer, config: dict[str, Any], special: dict[str, str]) -> None:
    """Tokens that the configuration names and the tokenizer's own file does not have."""
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict):
        known = set(_added_tokens(tokenizer))
        numbered = sorted((int(key), token) for key, token in listed.items() if key.isdigit())
        for _, token in numbered:
            flags = {flag: bool(token.get(flag)) for flag in _FLAGS if flag in token}
            kept = {flag: value for flag, value in flags.items() if flag != "special"}
            if (text := _content(token)) and AddedToken(text, **kept) not in known:
                tokenizer.add_tokens([LibraryToken(text, **flags)])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = [
        *special.values(),
        *map(_content, extra.values() if isinstance(extra, dict) else extra),
    ]
    known_texts = {token.content for token in _added_tokens(tokenizer)}
    missing = [text for text in dict.fromkeys(named) if text and text not in known_texts]
    tokenizer.add_special_tokens(
        [LibraryToken(text, special=True, normalized=False) for text in missing]
    )


def _added_tokens(tokenizer: Tokenizer) -> list[AddedToken]:
    return [
        AddedToken(
            token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
        )
        for _, token in sorted(tokenizer.get_added_tokens_decoder().items())
    ]


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files of their own go before what the configuration holds."""
    found = {}
    if (file := folder / _TEMPLATE_FILE).is_file():
        found["default"] = read_template(str(file))
    if (further := folder / _TEMPLATE_FOLDER).is_dir():
        for name in sorted(os.listdir(further)):
            if name.endswith(".jinja"):
                found[name.removesuffix(".jinja")] = read_template(str(further / name))
    if found:
        return found
    given = config.get("chat_template")
    if given is None:
        given = _read_json(folder / _OLD_TEMPLATE_FILE).get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    listed = given if isinstance(given, list) else []
    return {
        one["name"]: one["template"]
        for one in listed
        if isinstance(one, dict)
        and isinstance(one.get("name"), str)
        and isinstance(one.get("template"), str)
    }


def read_template(path: str) -> str:
    """The text of a template file. Raises ConfigError."""
    try:
        return _read(Path(path)).decode()
    except FileNotFoundError:
        raise ConfigError([f"{path}: there is no such file"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{path}: not UTF-8 text"]) from None
