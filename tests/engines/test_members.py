"""Where members of JSON objects are, and edits in place: both forms against msgspec and json."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from calinix.engines import fast, members
from calinix.engines.json_edits import (
    JsonObject,
    decode_members,
    encode_members,
    without_transfer_fields,
)
from calinix.engines.members import MAX_CHANGES, MAX_COMPARED, Changes
from calinix.errors import BadRequest

FORMS = pytest.mark.parametrize("form", [fast, members])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ['"', "\\", '\\"', '\\\\"', "[{", "}]", "a" * 40 + '"{', "\x00\x1f\u00e9", 'x\\" , "y":[1'],
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
SPACE = st.text(" \t\r\n", max_size=2)
NAMES = st.sampled_from(["a", "b", "stream", "n", "max_tokens", "e\u0301"]) | TEXTS


@st.composite
def objects(draw: st.DrawFn, *, repeats: bool = False) -> bytes:
    """A JSON object in any dress: spaces, escapes, indents; with `repeats` names may come twice."""
    pairs = draw(st.lists(st.tuples(NAMES, VALUES), max_size=6))
    if not repeats:
        pairs = list(dict(pairs).items())

    def dressed(value: Any) -> str:
        plain = draw(st.booleans())
        text = json.dumps(value, ensure_ascii=plain, indent=draw(st.sampled_from([None, 1])))
        return draw(SPACE) + text + draw(SPACE)

    body = ",".join(f"{dressed(name)}:{dressed(value)}" for name, value in pairs)
    return f"{draw(SPACE)}{{{body or draw(SPACE)}}}{draw(SPACE)}".encode()


def members_of(form: Any, body: bytes) -> Any:
    """As JsonObject does it, by one form."""
    found = form.find_members(body)
    return found or form.find_members(encode_members(decode_members(body)), True)


def raw_of(body: bytes) -> dict[str, bytes]:
    """The members as the decoder finds them."""
    raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return {name: bytes(value) for name, value in raw.items()}


def is_plain(name: str) -> bool:
    """Whether a name is written as it is."""
    return json.dumps(name, ensure_ascii=False) == f'"{name}"'


@FORMS
@given(body=objects(repeats=True))
def test_members_are_what_a_parser_finds(form: Any, body: bytes) -> None:
    """Each value's bytes are msgspec's, of a name that comes twice the last one's."""
    found = members_of(form, body)
    raw = {name: value for name, value in raw_of(body).items() if is_plain(name)}
    assert {name: found.value(name) for name in raw} == raw
    assert found.among((*raw, "not there"), "\n") == raw
    assert found.span("not there") is found.value("not there") is None
    assert found.among(("a",), "ma") == {
        name: value for name, value in raw.items() if name == "a" or name.startswith("ma")
    }


@given(st.binary(max_size=60) | st.text('{}[]":,\\ \n1a-\u00e9', max_size=40).map(str.encode))
@example(b'{"a":"\\')
@example(b'{"\\ud800":1}')
@example(b'{"a":1,}')
@example(b'{"\xff":1,"\xc3":2}')
@example(b'{"a":"' + b"\\" * 9 + b'"}')
def test_any_bytes_are_read_alike(body: bytes) -> None:
    """Both forms say the same of any bytes, and what they take for members is within them."""
    for anew in (False, True):
        found, plain = fast.find_members(body, anew), members.find_members(body, anew)
        assert (found is None) == (plain is None)
        if found is not None and plain is not None:
            assert found.among((), "") == plain.among((), "")
            changes: Changes = {"a": b"1", "b": None}
            assert found.edited(changes) == plain.edited(changes)


@FORMS
@pytest.mark.parametrize("count", [11, 12, 13, 24, 25, 49, MAX_COMPARED, MAX_COMPARED + 1, 300])
def test_objects_of_any_width_are_read(form: Any, count: int) -> None:
    """All of their members are found; a wide one is written anew, in case a name comes twice."""
    names = [f"n{number}" for number in range(count)]
    body = json.dumps(dict.fromkeys(names, 1)).encode()
    assert (form.find_members(body) is None) == (count > MAX_COMPARED)
    found = members_of(form, body)
    assert list(found.among(tuple(names), "x")) == names
    assert list(json.loads(found.edited({names[-1]: None, "last": b"2"}))) == [*names[:-1], "last"]


@FORMS
@given(body=objects(), cut=st.integers(1, 400))
def test_a_part_of_an_object_is_none(form: Any, body: bytes, cut: int) -> None:
    """Whatever is missing at the end, it is no object; nor with something behind it."""
    whole = body.rstrip()
    assert form.find_members(whole[:-cut] if cut <= len(whole) else b"") is None
    assert form.find_members(body + b"x") is None


@FORMS
@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{", b"[]", b"1", b'"a"', b"{]", b"{,}", b"{1:2}", b'{"a"}', b'{"a":}',
        b'{"a" 1}', b'{"a":1 "b":2}', b'{"a":1}}', b'{"a":[}', b'{"a":1,"a":2}',
        b'{"a":1,"\\u0061":2}',
        b'{"\\x":1}', b'{"\\u0061":1}', b'{"a":?}', b'{"a":1', b'{"a":{"b":1}', b'{"a":"', b'{"a',
    ],
)  # fmt: skip
def test_what_is_not_read_here(form: Any, body: bytes) -> None:
    """No object, or a name twice, however it is spelled."""
    assert form.find_members(body) is None


@given(objects(), st.dictionaries(NAMES.filter(str.isidentifier), st.none() | VALUES, max_size=6))
def test_edits_equal_those_of_the_parsed_object(body: bytes, wanted: dict[str, Any]) -> None:
    """Set, added and taken out as in a dictionary; and the others keep their bytes and places."""
    changes: Changes = {
        name: None if value is None else msgspec.json.encode(value)
        for name, value in wanted.items()
        if name.isascii()
    }
    edited = members_of(fast, body).edited(changes)
    assert edited == members_of(members, body).edited(changes)
    expected = raw_of(body)
    for name, value in changes.items():
        if value is None:
            expected.pop(name, None)
        else:
            expected[name] = value
    assert list(raw_of(edited).items()) == list(expected.items())


@FORMS
@pytest.mark.parametrize(
    ("body", "changes", "edited"),
    [
        (b'{ "a": 1 , "b":2 }\n', {"a": b"9"}, b'{ "a": 9 , "b":2 }\n'),
        (b'{ "a": 1 , "b":2 }', {"a": None}, b'{ "b":2 }'),
        (b'{ "a": 1 , "b":2, "c":3 }', {"b": None, "c": None}, b'{ "a": 1 }'),
        (b'{"a":1, "b":2, "c":3}', {"b": None, "a": None, "d": b"4"}, b'{"c":3,"d":4}'),
        (b'{"a":1,"b":2}', {"a": None, "b": None}, b"{}"),
        (b'{"a":1,"b":2 }', {"a": None, "b": None, "c": b"[]", "d": b"0"}, b'{"c":[],"d":0}'),
        (b" { } ", {"c": b"1"}, b" {" + b'"c":1}'),
        (b'{"a":1 } ', {"c": b"1", "x": None}, b'{"a":1,"c":1}'),
    ],
)
def test_commas_follow(form: Any, body: bytes, changes: Changes, edited: bytes) -> None:
    """With a member goes one comma, and its own space."""
    assert form.find_members(body).edited(changes) == edited


@FORMS
def test_edits_are_bounded(form: Any) -> None:
    """More changes than there are kinds of are refused."""
    many: Changes = {f"n{number}": b"1" for number in range(MAX_CHANGES + 1)}
    found = form.find_members(b'{"n0":2,"n9":[]}')
    with pytest.raises(ValueError, match="changes"):
        found.edited(many)
    del many["n0"]
    assert json.loads(found.edited(many)) == {"n0": 2} | dict.fromkeys(many, 1)


def test_the_compiled_form_checks_its_arguments() -> None:
    """It is made by reading, and takes bytes alone for values."""
    kind: Any = fast.Members
    if kind is members.Members:
        return
    with pytest.raises(TypeError):
        kind()
    found: Any = fast.find_members(b'{"a":1}')
    many: list[Any] = [{"a": "1"}, {1: b"1"}, [], {"a": 1}]
    for wrong in many:
        with pytest.raises(TypeError):
            found.edited(wrong)


@given(objects(repeats=True))
def test_of_a_name_that_comes_twice_the_last_counts(body: bytes) -> None:
    """As for the engines; then nothing of the earlier one is left."""
    expected = json.loads(body) | {"added_1": 1}
    assert json.loads(JsonObject(body).edited({"added_1": b"1"})) == expected


def test_what_is_no_object_is_refused() -> None:
    """As by the decoder."""
    with pytest.raises(BadRequest):
        JsonObject(b"[1]")


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (b'{"a":1, "\\u0062ootstrap_room":2}', b'{"a":1}'),
        (b'{"a":1,"data_parallel_rank":2}', b'{"a":1}'),
        (b'{"vllm_xargs":{"bootstrap_x":1,"y":2}}', b'{"vllm_xargs":{"y":2}}'),
        (b'{"vllm_xargs": {"y":2} }', b'{"vllm_xargs": {"y":2} }'),
        (b'{"bootstrapped":1 }', b'{"bootstrapped":1 }'),
    ],
)
def test_transfer_fields_are_left_out(body: bytes, left: bytes) -> None:
    """However they are spelled and wherever they hide; without any the body is as it came."""
    assert without_transfer_fields(body).body == left


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("[ \"a\",\n'b']", None), ('[ "a" , "b"]', 2), ("[[1],[2],[3]]", 3), ("[1,2]", None),
        ("[]", None), ('"[1]"', None), ("null", None), ("{}", None),
    ],
)  # fmt: skip
def test_batches_are_counted(prompt: str, count: int | None) -> None:
    """Lists of texts and of token ids; anything else is one prompt."""
    found = JsonObject(f'{{"prompt" : {prompt}, "x":1}}'.encode())
    if "'" in prompt:
        with pytest.raises(BadRequest, match="prompt"):
            found.prompts()
    else:
        assert found.prompts() == count
    assert JsonObject(b"{}").prompts() is None
