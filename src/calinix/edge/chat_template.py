"""A model's chat template, applied as engines apply it: sandboxed, immutable, bounded.

The template is the operator's, what it is given is the client's. It can change nothing, reach
nothing but its variables, and write no more than MAX_CHARS.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from calinix.edge.template_shape import reads_parts
from calinix.errors import CalinixError

MAX_CHARS = 8_388_608
"""A longer prompt than this is not written to its end."""

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""What marks, while rendering, where the message that is to be continued ends."""
_PARAMETERS = frozenset({"documents", "add_generation_prompt", "continue_final_message"})
"""What every template is given, whether it reads it or not."""
_DICT_NAMES = frozenset(dir({}))
_FAULTS = (
    jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What a template can run into when it is given what it was not written for."""


class TemplateRefusedError(CalinixError):
    """The template cannot be read, or does not take this conversation."""


class _Generation(Extension):
    """`{% generation %}`: marks what a model is trained to write; its text stands as it is."""

    tags = {"generation"}  # noqa: RUF012  jinja2 wants a set

    def parse(self, parser: Parser) -> nodes.Node:
        """Jinja's hook."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Macro) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja's escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Environment(ImmutableSandboxedEnvironment):
    """Reaches what templates ask for most, several times as fast as jinja and to the same end."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`message.role`, `loop.last`, `namespace.x`; all else is jinja's."""
        kind = type(obj)
        if kind is dict:
            # No attribute but a dict's own can go before the key.
            if attribute not in _DICT_NAMES:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif (kind is LoopContext or kind is Namespace) and attribute[0] != "_":
            # Safe by the sandbox's own rule: of these types it hides only underscored names.
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    found = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    found.filters["tojson"] = _to_json
    found.globals["raise_exception"] = _raise_exception
    found.globals["strftime_now"] = lambda form: now().strftime(form)
    return found


class ChatTemplate:
    """One compiled template. Any thread may render."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        as_parts: bool | None = None,
        now: Callable[[], datetime] = datetime.now,
    ):
        """Compiles `source`. `as_parts` None: what the template itself reads.

        Raises TemplateRefusedError.
        """
        environment = _environment(now)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
            self._reads = meta.find_undeclared_variables(tree) | _PARAMETERS
        except (*_FAULTS, RecursionError) as error:
            raise TemplateRefusedError(f"the chat template cannot be read: {error}") from error
        self.as_parts = reads_parts(tree) if as_parts is None else as_parts
        """It gets contents as lists of parts, not as texts."""
        self._special = dict(special_tokens)
        self._knows_content = "content" in source
        self._knows_developer = '"developer"' in source or "'developer'" in source

    def render(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt. Raises TemplateRefusedError: it is not for this conversation, or too long."""
        given = {name: value for name, value in variables.items() if name in self._reads}
        if not self._knows_developer:
            conversation = without_developer(conversation)
        continued = None
        if given.pop("continue_final_message", False):
            conversation, continued = self._open_ended(conversation)
        values = {"documents": None, "add_generation_prompt": False, **self._special, **given}
        try:
            context = self._template.new_context(
                {**values, "messages": conversation, "tools": tools}
            )
            text = _bounded(self._template.root_render_func(context))
        except _FAULTS as error:
            raise TemplateRefusedError(f"the chat template refuses: {error}") from error
        return text if continued is None else _cut_open(text, continued)

    def _open_ended(self, conversation: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """The conversation with a tag behind its last text, and that text."""
        last = copy.deepcopy(conversation[-1])
        content = last["content"]
        if not self._knows_content:
            raise TemplateRefusedError("the chat template has no place for a message to continue")
        if isinstance(content, str):
            last["content"] = content + _TAG
        else:
            texts = [part for part in content if "text" in part]
            if not texts:
                raise TemplateRefusedError("the last message has no text to continue")
            content = texts[-1]["text"]
            texts[-1]["text"] = content + _TAG
        return [*conversation[:-1], last], content


def _bounded(pieces: Iterable[str]) -> str:
    found = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_CHARS:
            raise TemplateRefusedError("the prompt is too long")
        found.append(piece)
    return "".join(found)


def _cut_open(text: str, continued: str) -> str:
    """The prompt up to the end of the message that is to be continued."""
    place = text.rfind(_TAG.strip())
    if place < 0 or continued.strip() not in text:
        raise TemplateRefusedError("the chat template drops the message to continue")
    if text.startswith(_TAG, place):
        return text[:place]
    # The template strips what it is given.
    return text[:place].rstrip()


def without_developer(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that do not know the role: developers speak as the system does.

    All system messages then become one, at the beginning.
    """
    if not any(message["role"] == "developer" for message in conversation):
        return conversation
    spoken: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    scattered = False
    for place, message in enumerate(conversation):
        if message["role"] not in ("system", "developer"):
            others.append(message)
            continue
        scattered = scattered or place > 0 or bool(spoken)
        spoken.append(message)
    if not scattered:
        alone = {k: v for k, v in spoken[0].items() if k != "tools"}
        return [{**alone, "role": "system"}, *others]
    texts = [text for text in map(_text_of, spoken) if text]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)
