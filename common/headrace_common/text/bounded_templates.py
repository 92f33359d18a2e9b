"""Tells from their syntax which chat templates have bounded operations.

The sandbox checks the time between operations, but a single operation can also run indefinitely:
printing lists that each hold the previous one twice, or padding a text to a gigabyte. In a bounded
template each operation takes time linear in its input, its result is not longer, and no value
contains another.
"""

from jinja2 import nodes

MOST_SETS = 100
_PLAIN = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.NSRef,
    nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Test, nodes.If, nodes.Compare, nodes.Operand,
    nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Add, nodes.Sub, nodes.Concat, nodes.CondExpr,
    nodes.Keyword, nodes.Break, nodes.Continue, nodes.EvalContextModifier,
)  # fmt: skip
_FILTERS = frozenset({
    "abs", "capitalize", "count", "e", "escape", "first", "int", "items", "last", "length", "list",
    "lower", "rejectattr", "reverse", "safe", "selectattr", "string", "title", "tojson", "trim",
    "upper",
})  # fmt: skip
_METHODS = frozenset({
    "capitalize", "endswith", "get", "items", "keys", "lower", "lstrip", "rstrip", "split",
    "splitlines", "startswith", "strip", "title", "upper", "values",
})  # fmt: skip
_MOST_INDENT = 16


def is_bounded(template: nodes.Template, own_filters: frozenset[str]) -> bool:
    """Whether all operations of a template are bounded.

    `own_filters` are those that the environment puts around expressions; they are linear.
    """
    sets = list(template.find_all(nodes.Assign))
    spaces = {
        one.target.name
        for one in sets
        if _is_space(one.node) and isinstance(one.target, nodes.Name)
    }
    return len(sets) <= MOST_SETS and _Check(own_filters, spaces).bounded(template)


class _Check:
    """Checks the nodes of one template.

    `spaces` are the names of its namespaces. A template may only use their attributes: printing two
    namespaces that hold each other would not end.
    """

    def __init__(self, own_filters: frozenset[str], spaces: set[str]) -> None:
        self._own_filters = own_filters
        self._spaces = spaces

    def bounded(self, node: nodes.Node) -> bool:
        children = list(node.iter_child_nodes())
        if not isinstance(node, nodes.Getattr) and any(map(self._reads_space, children)):
            return False
        return self._allowed(node) and all(map(self.bounded, children))

    def _reads_space(self, node: nodes.Node) -> bool:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in self._spaces

    def _allowed(self, node: nodes.Node) -> bool:
        match node:
            case nodes.Filter():
                return self._filter(node)
            case nodes.Call():
                return _call(node)
            case nodes.For():
                return not node.recursive
            case nodes.Assign():
                named = isinstance(node.target, nodes.Name) or not _is_space(node.node)
                return named and not any(map(_grows, _within(node.node)))
            case nodes.List():
                return _constant(node)
            case nodes.Tuple():
                return node.ctx == "store" or _constant(node)
            case nodes.Mod():  # for a text, it would be a format
                return _of_loop(node.left) and isinstance(node.right, nodes.Const)
            case _:
                return type(node) in _PLAIN

    def _filter(self, node: nodes.Filter) -> bool:
        if node.node is None or node.dyn_args is not None or node.dyn_kwargs is not None:
            return False
        if node.name in self._own_filters or node.name in ("default", "d"):
            return True
        given = [*node.args, *(one.value for one in node.kwargs)]
        numbers = [one.value for one in given if isinstance(one, nodes.Const)]
        short = all(not isinstance(one, int) or one <= _MOST_INDENT for one in numbers)
        return node.name in _FILTERS and len(numbers) == len(given) and short


def _call(node: nodes.Call) -> bool:
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        return False
    if isinstance(node.node, nodes.Getattr):
        return node.node.attr in _METHODS
    match node.node:
        case nodes.Name(name="raise_exception"):
            return True
        case nodes.Name(name="namespace"):
            return not node.args and all(_scalar(one.value) for one in node.kwargs)
        case nodes.Name(name="strftime_now"):
            return all(_is_pattern(one) for one in node.args) and not node.kwargs
        case _:
            return False


def _is_pattern(node: nodes.Node) -> bool:
    """Whether a pattern for strftime is constant and has no widths, which would pad the result."""
    text = node.value if isinstance(node, nodes.Const) else None
    return isinstance(text, str) and not any(map(str.isdigit, text))


def _scalar(node: nodes.Node) -> bool:
    match node:
        case nodes.Const() | nodes.Compare() | nodes.Test() | nodes.Not():
            return True
        case nodes.Filter(name="length" | "count"):
            return True
        case nodes.Add() | nodes.Sub():
            return _scalar(node.left) and _scalar(node.right)
        case _:
            return isinstance(node, nodes.List) and _constant(node)


def _grows(node: nodes.Node) -> bool:
    """Whether a text or list may get longer. An addition of numbers has a constant operand."""
    if isinstance(node, nodes.Add):
        return not any(
            isinstance(one, nodes.Const) and isinstance(one.value, int | float)
            for one in (node.left, node.right)
        )
    return isinstance(node, nodes.Concat)


def _within(node: nodes.Node) -> list[nodes.Node]:
    return [node, *node.find_all(nodes.Node)]


def _is_space(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Call) and getattr(node.node, "name", None) == "namespace"


def _constant(node: nodes.List | nodes.Tuple) -> bool:
    return all(isinstance(one, nodes.Const) for one in node.items)


def _of_loop(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Getattr) and getattr(node.node, "name", None) == "loop"
