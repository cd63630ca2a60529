"""Edits of JSON bodies: what is stripped is gone, what is not keeps its bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix.core.bodies import is_transfer_field
from calinix.engines.json_edits import (
    decode_members,
    encode_members,
    strip_transfer_fields,
    with_members,
)
from calinix.errors import BadRequest

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["model", "kv_transfer_params", "ec_transfer_params", "bootstrap_room", "bootstrap_host", "n"]
)


def escaped(name: str) -> str:
    """The name as a JSON string with every character escaped."""
    return '"' + "".join(f"\\u{ord(c):04x}" for c in name) + '"'


@pytest.mark.parametrize(
    "name", ["kv_transfer_params", "ec_transfer_params", "bootstrap_room", "bootstrap_host"]
)
@pytest.mark.parametrize("spelled", [json.dumps, escaped])
def test_transfer_fields_are_stripped_however_spelled(name: str, spelled: Any) -> None:
    """Plain or escaped, first, last or twice: the field is gone and the rest stays."""
    key = spelled(name)
    body = f'{{{key}: 1, "model":"m" , {key}:{{"a":[1]}}, "x": 1.50,{key}:null}}'
    assert strip_transfer_fields(body.encode()) == b'{"model":"m","x":1.50}'


def test_transfer_fields_inside_extra_arguments_are_stripped() -> None:
    """A pod merges `vllm_xargs` into the engine's arguments, so it is no hiding place."""
    body = b'{"vllm_xargs":{"k\\u0076_transfer_params":{"a":1}, "keep" : [1, 2]},"n":1}'
    assert strip_transfer_fields(body) == b'{"vllm_xargs":{"keep":[1, 2]},"n":1}'


def test_nothing_to_strip_gives_the_same_object() -> None:
    """A clean body is not copied."""
    body = b'{ "model" : "m", "vllm_xargs": {"a": 1}, "note": "kv_transfer_params" }'
    assert strip_transfer_fields(body) is body
    odd = b'{"vllm_xargs":"kv_transfer_params"}'
    assert strip_transfer_fields(odd) is odd


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"1", b'{"a":1', b'{"a":1} x', b'{"a":NaN}', b"\xff\xfe", b'{"a":' + b"[" * 99999],
)
def test_what_is_not_an_object_is_refused(body: bytes) -> None:
    """Anything but one JSON object is a BadRequest, hostile nesting too."""
    with pytest.raises(BadRequest):
        strip_transfer_fields(body)


def test_untouched_values_keep_their_exact_bytes() -> None:
    """Numbers, spacing and escapes inside values survive an edit as they were."""
    body = b'{"a":1e2,"b":{"x" :  [1.0,\t2]},"c":"\\u00e9\\/","bootstrap_room":7}'
    assert strip_transfer_fields(body) == b'{"a":1e2,"b":{"x" :  [1.0,\t2]},"c":"\\u00e9\\/"}'


@given(st.lists(st.tuples(NAMES, VALUES, st.booleans()), max_size=6))
def test_stripping_equals_deleting_from_the_parsed_object(
    members: list[tuple[str, Any, bool]],
) -> None:
    """For any members, escapes and duplicates, the result parses to the object less the fields."""
    body = ",".join(
        f"{escaped(name) if hide else json.dumps(name)}:{json.dumps(value)}"
        for name, value, hide in members
    )
    text = f"{{{body}}}"
    kept = {k: v for k, v in json.loads(text).items() if not is_transfer_field(k)}
    assert json.loads(strip_transfer_fields(text.encode())) == kept


@given(st.dictionaries(st.text("abc\u00e9", max_size=3), VALUES, max_size=4), VALUES)
def test_a_member_is_added_and_the_rest_is_not_touched(obj: dict[str, Any], value: Any) -> None:
    """`with_members` only appends: what stood there stands there."""
    body = json.dumps(obj, indent=1).encode() + b" \n"
    result = with_members(body, {"added": json.dumps(value).encode()})
    assert json.loads(result) == {**obj, "added": value}
    assert result.startswith(body.rstrip()[:-1].rstrip())


def test_members_go_round() -> None:
    """Decoding and encoding leaves order and values alone."""
    body = b'{"b":[1, 2],"a":{"x":0.10}}'
    assert encode_members(decode_members(body)) == body
