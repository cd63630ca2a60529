"""What a chat template does with a message's content: takes it as a text, or reads its parts.

Engines decide this from the template's syntax tree, and flatten contents accordingly. So the same
question has to have the same answer here: is there a loop over a message's content?
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

_MAX_NAMES = 1000


class _UnreadableError(Exception):
    """A shape that the engine does not follow either."""


def reads_parts(tree: nodes.Template) -> bool:
    """Whether some loop goes over the content of a message."""
    try:
        names = list(_message_names(tree))
        given = _parameters_with_content(tree, names)
        in_macros = {id(loop) for macro in tree.find_all(nodes.Macro) for loop in _loops(macro)}
        for loop in _loops(tree):
            over = loop.iter
            if any(_leads_to(over, name, "content") for name in names) or (
                isinstance(over, nodes.Name)
                and (
                    over.name in given.get(id(loop), ())
                    or (over.name == "content" and id(loop) not in in_macros)
                )
            ):
                _target(loop)
                return True
    except _UnreadableError:
        pass
    return False


def _loops(node: nodes.Node) -> Iterator[nodes.For]:
    return node.find_all(nodes.For)


def _target(loop: nodes.For) -> str:
    if not isinstance(loop.target, nodes.Name):
        raise _UnreadableError
    return loop.target.name


def _leads_to(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether `node` is the variable (or its `key`), perhaps filtered, tested or sliced."""
    while True:
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
            continue
        break
    if key is not None:
        if isinstance(node, nodes.Getitem):
            if not (isinstance(node.arg, nodes.Const) and node.arg.value == key):
                return False
        elif not (isinstance(node, nodes.Getattr) and node.attr == key):
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _names_of_messages(tree: nodes.Template) -> list[str]:
    """`messages`, and what it, or a part of it, is assigned to."""
    names = ["messages"]
    for name in names:
        for assign in tree.find_all(nodes.Assign):
            if _leads_to(assign.node, name):
                if not isinstance(assign.target, nodes.Name):
                    raise _UnreadableError
                if assign.target.name not in names and len(names) < _MAX_NAMES:
                    names.append(assign.target.name)
    return names


def _message_names(tree: nodes.Template) -> Iterator[str]:
    """The variables of loops over messages."""
    lists = _names_of_messages(tree)
    for loop in _loops(tree):
        if any(_leads_to(loop.iter, name) for name in lists):
            yield _target(loop)


def _parameters_with_content(tree: nodes.Template, names: list[str]) -> dict[int, set[str]]:
    """For loops inside macros: the macro's parameters that are called with a message's content."""
    found: dict[int, set[str]] = {}
    calls = [call for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Name)]
    for macro in tree.find_all(nodes.Macro):
        parameters = [argument.name for argument in macro.args]
        given: set[str] = set()
        for call in calls:
            if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
                continue
            passed = [*zip(parameters, call.args, strict=False)]
            passed += [(k.key, k.value) for k in call.kwargs if k.key in parameters]
            given |= {p for p, v in passed if any(_leads_to(v, n, "content") for n in names)}
        for loop in _loops(macro):
            if given:
                found[id(loop)] = given
    return found
