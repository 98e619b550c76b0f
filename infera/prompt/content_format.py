"""Does a chat template want message content as a string, or as a list of parts?

Engines look at the template: one that loops over a message's content gets the parts as they came
("openai"), any other gets the text parts joined into one string ("string"). The same question is asked here
in the same way, because the answer changes the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from jinja2 import nodes

from infera.prompt.template import ChatTemplate

ContentFormat = Literal["string", "openai"]


def detect_content_format(template: ChatTemplate) -> ContentFormat:
    """The format of ``template``; "string" where nothing loops over a message's content."""
    tree = template.environment.parse(template.source)
    try:
        return "openai" if any(_loops_over_content(tree)) else "string"
    except _NotFollowedError:
        return "string"


class _NotFollowedError(Exception):
    """The template does something with its loops that this analysis does not follow."""


def _loops_over_content(tree: nodes.Template) -> Iterator[bool]:
    messages = list(_message_variables(tree))
    parameters, inside_macros = _macro_loops(tree, messages)
    for loop in tree.find_all(nodes.For):
        if any(_reaches(loop.iter, name, "content") for name in messages):
            yield True
        elif isinstance(loop.iter, nodes.Name):
            name = loop.iter.name
            yield name in parameters.get(id(loop), ()) or (name == "content" and id(loop) not in inside_macros)


def _message_variables(tree: nodes.Template) -> Iterator[str]:
    """Names that hold one message: targets of loops over ``messages`` or over something assigned from it."""
    lists = _aliases(tree, "messages")
    for loop in tree.find_all(nodes.For):
        if any(_reaches(loop.iter, name) for name in lists):
            yield _target_name(loop.target)


def _aliases(tree: nodes.Template, name: str) -> list[str]:
    names = [name]
    for known in names:  # grows while we walk; every name enters once
        for assignment in tree.find_all(nodes.Assign):
            if _reaches(assignment.node, known):
                target = _target_name(assignment.target)
                if target not in names:
                    names.append(target)
    return names


def _macro_loops(tree: nodes.Template, messages: list[str]) -> tuple[dict[int, set[str]], set[int]]:
    """For each loop inside a macro: the macro's parameters that receive a message's content."""
    parameters: dict[int, set[str]] = {}
    inside: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        received: set[str] = set()
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                given = dict(zip(names, call.args, strict=False))
                given.update({word.key: word.value for word in call.kwargs if isinstance(word, nodes.Keyword)})
                received |= {
                    name
                    for name, value in given.items()
                    if name in names and any(_reaches(value, message, "content") for message in messages)
                }
        for loop in macro.find_all(nodes.For):
            inside.add(id(loop))
            parameters[id(loop)] = received
    return parameters, inside


def _reaches(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """Whether an expression is ``name`` (or ``name.key``), perhaps filtered, tested or sliced."""
    while isinstance(node, (nodes.Filter, nodes.Test)) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        if node.node is None:
            return False
        node = node.node
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == key and _reaches_plain(node.node, name)
    return isinstance(node, nodes.Getattr) and node.attr == key and _reaches_plain(node.node, name)


def _reaches_plain(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _target_name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _NotFollowedError(type(target).__name__)
    return target.name
