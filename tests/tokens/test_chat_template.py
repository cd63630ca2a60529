"""Chat templates: what they are given, what they may not do, what engines take them to read."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from calinix.edge import chat_template
from calinix.edge.chat_template import ChatTemplate, TemplateRefusedError, without_developer

HELLO = [{"role": "user", "content": "hello"}]
LOOP = "{{% for m in {} %}}{{% for p in m.content %}}{{% endfor %}}{{% endfor %}}"
MACRO = "{% macro w(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
EACH = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def written(source: str, conversation: list[dict[str, Any]] | None = None, **given: Any) -> str:
    """What a template makes of a conversation."""
    day = datetime(2026, 5, 1)  # noqa: DTZ001  templates tell the local day
    template = ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: day)
    return template.render(conversation or HELLO, given.pop("tools", None), given)


def test_what_templates_know() -> None:
    """Messages, tools, special tokens, variables, the day, and JSON as it is."""
    assert written("{{ bos_token }}" + EACH) == "<s>[user]hello"
    assert written("{{ tools[0] | tojson }}", tools=[{"a": "<é'>"}]) == '{"a": "<é\'>"}'
    assert written("{{ documents is none }}{{ tools is none }}{{ eos_token }}") == "TrueTrue"
    assert written("{{ strftime_now('%d %b') }}") == "01 May"
    assert written("{{ x }}{{ bos_token }}", x=1, bos_token="!", unused=2) == "1!"
    assert written("{% if add_generation_prompt %}A{% endif %}", add_generation_prompt=True) == "A"


def test_blocks_leave_no_lines() -> None:
    """Lines of nothing but a block vanish, loops can be left, generation marks are nothing."""
    source = (
        "{% for m in [1, 2, 3] %}\n"
        "  {% if m == 2 %}\n"
        "    {% break %}\n"
        "  {% endif %}\n"
        "{% generation %}{{ m }}{% endgeneration %}\n"
        "{% endfor %}"
    )
    assert written(source) == "1"


def test_dicts_are_reached_as_jinja_does() -> None:
    """Methods go before keys, missing keys are undefined, of every kind of dict."""
    message = {"role": "user", "content": "c", "items": 1, "get": 2}
    assert written("{{ messages[0].items is callable }}{{ messages[0]['items'] }}", [message]) == (
        "True1"
    )
    assert written("{{ messages[0].get('role') }}{{ messages[0].nothing is defined }}") == (
        "userFalse"
    )


def test_loops_and_namespaces_are_reached_as_jinja_does() -> None:
    """What loops and namespaces hold is there, what they do not is undefined."""
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}"
        "{{ loop.first }}{{ loop.nothing is defined }}{{ loop._length is defined }}{% endfor %}"
        "{{ ns.n }}{{ ns.m is defined }}"
    )
    assert written(source) == "TrueFalseFalse1False"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'x' %}",
    ],
)
def test_what_templates_may_not_do(source: str) -> None:
    """Nothing is changed or reached; whatever goes wrong is one refusal."""
    messages = [dict(HELLO[0])]
    with pytest.raises(TemplateRefusedError):
        written(source, messages)
    assert messages == HELLO


@pytest.mark.parametrize("source", ["{% for %}", "{{ a", "{% unknown %}"])
def test_templates_that_cannot_be_read(source: str) -> None:
    """A fault in the template is told when it is loaded."""
    with pytest.raises(TemplateRefusedError, match="cannot be read"):
        ChatTemplate(source, {})


def test_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that grows over the bound is given up, not written to its end."""
    monkeypatch.setattr(chat_template, "MAX_CHARS", 1000)
    assert len(written("{% for i in range(9) %}{{ '0123456789' * 10 }}{% endfor %}")) == 900
    with pytest.raises(TemplateRefusedError, match="too long"):
        written("{% for i in range(90000) %}{{ '0123456789' * 10 }}{% endfor %}")


def test_a_message_that_is_continued_stays_open() -> None:
    """What a template writes behind the last message is left out; stripped ends stay stripped."""
    talk = [*HELLO, {"role": "assistant", "content": "so far "}]
    closed = "{% for m in messages %}{{ m.content }}</end>{% endfor %}"
    assert written(closed, talk, continue_final_message=True) == "hello</end>so far "
    stripped = closed.replace("m.content", "m.content | trim")
    assert written(stripped, talk, continue_final_message=True) == "hello</end>so far"
    parts = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}</p>{% endfor %}{% endfor %}"
    )
    answer = {"role": "assistant", "content": [{"type": "text", "text": t} for t in ("a", "b ")]}
    assert written(parts, [answer], continue_final_message=True) == "a</p>b "
    assert answer["content"][1] == {"type": "text", "text": "b "}


def test_messages_that_cannot_be_continued() -> None:
    """Where the last text does not come out, or there is none, nothing is guessed."""
    talk = [*HELLO, {"role": "assistant", "content": "so far"}]
    for source in ("{{ messages[0].content }}", "{{ messages[0].role }}"):
        with pytest.raises(TemplateRefusedError):
            written(source, talk, continue_final_message=True)
    with pytest.raises(TemplateRefusedError):
        written(EACH, [{"role": "user", "content": []}], continue_final_message=True)


def test_developers_are_the_system_where_they_are_not_known() -> None:
    """Templates without the role get system messages, one of them, at the beginning."""
    developer = {"role": "developer", "content": "d", "tools": None}
    assert written(EACH, [developer, *HELLO]) == "[system]d[user]hello"
    assert written(EACH + "{% if 'developer' %}{% endif %}", [developer]) == "[developer]d"
    system = {"role": "system", "content": [{"type": "text", "text": "s"}]}
    empty = {"role": "system", "content": ""}
    assert without_developer([system, *HELLO, developer, empty]) == [
        {"role": "system", "content": "s\n\nd"},
        *HELLO,
    ]
    assert without_developer([system, system]) == [system, system]


@pytest.mark.parametrize(
    ("source", "reads_parts"),
    [
        (EACH, False),
        (LOOP.format("messages"), True),
        (
            "{% for m in messages[1:] %}{% for p in m['content'] | list %}{% endfor %}{% endfor %}",
            True,
        ),
        ("{% set all = messages %}{% set rest = all[1:] %}" + LOOP.format("rest"), True),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", False),
        (LOOP.format("others"), False),
        ("{% set content = 'x' %}{% for p in content %}{% endfor %}", True),
        ("{% macro w(content) %}{% for p in content %}{% endfor %}{% endmacro %}", False),
        (MACRO + "{% for m in messages %}{{ w(m.content) }}{% endfor %}", True),
        (MACRO + "{% for m in messages %}{{ w(c=m.content) }}{{ w(m.role) }}{% endfor %}", True),
        (MACRO + "{% for m in messages %}{{ w(m.role) }}{% endfor %}", False),
        ("{% for a, b in messages %}{% endfor %}{% for p in content %}{% endfor %}", False),
        ("{% set ns = namespace() %}{% set ns.m = messages %}{{ ns.m }}", False),
    ],
)
def test_which_templates_read_parts(source: str, reads_parts: bool) -> None:
    """A loop over a message's content, found as the engine finds it."""
    assert ChatTemplate(source, {}).as_parts is reads_parts
    assert ChatTemplate(source, {}, as_parts=not reads_parts).as_parts is not reads_parts
