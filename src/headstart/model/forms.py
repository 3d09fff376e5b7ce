"""Whether a module of the library is of a form that we know: it runs the same code, on parts that are all known.

Two modules run the same code if their forward functions, and the functions of their own files that these call, have
equal syntax trees, without annotations, defaults, decorators and docstrings. The library repeats the code of one model
in another, so most decoders of the common form have Llama's; one that adds a rule (a clip, a partial rotation) differs.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

from torch import nn


def runs_code_of(module: nn.Module, known: Iterable[type[nn.Module]], helpers: Iterable[str] = ()) -> bool:
    """Whether the forward of `module` is the code of one of the `known` classes, helper functions included.

    `helpers` names the functions of its file that a forward may call, directly or from one another.
    """
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return False
    names = tuple(helpers)
    own = _trees(type(module), names)
    return own is not None and any(own == _trees(reference, names) for reference in known)


def has_only(module: nn.Module, children: set[str], parameters: Iterable[str] = ()) -> bool:
    """Whether the direct submodules are exactly `children`, the direct parameters `parameters`, and no buffer besides."""
    own_parameters = {name for name, _ in module.named_parameters(recurse=False)}
    own_buffers = {name for name, _ in module.named_buffers(recurse=False)}
    return (
        {name for name, _ in module.named_children()} == children
        and own_parameters == set(parameters)
        and not own_buffers
    )


def reads_parameters_of(parent: type[nn.Module], child: str) -> bool:
    """Whether code of `parent` looks at `.weight` or `.bias` of its submodule `child` instead of only calling it. True
    if its code cannot be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(parent)))
    except (OSError, TypeError, SyntaxError):
        return True
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in ("weight", "bias")
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == child
        for node in ast.walk(tree)
    )


def drops_keywords(parent: type[nn.Module], child: str) -> bool:
    """Whether the forward of `parent` calls its submodule `child` without passing on the keywords that it was given."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(parent.forward))))
    except (OSError, TypeError, SyntaxError):
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_child(node.func, child)]
    return bool(calls) and not any(keyword.arg is None for call in calls for keyword in call.keywords)


def _is_child(node: ast.expr, child: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == child and isinstance(node.value, ast.Name)


def _trees(owner: type[nn.Module], helpers: tuple[str, ...]) -> tuple[str, ...] | None:
    forward = inspect.unwrap(owner.forward)
    functions = [forward, *(_helper(forward, name) for name in helpers)]
    trees = [_tree(function) for function in functions if function is not None]
    return None if None in trees else tuple(tree for tree in trees if tree is not None)


def _helper(forward: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    found = forward.__globals__.get(name) if isinstance(forward, FunctionType) else None
    return inspect.unwrap(found) if callable(found) else None


def _tree(function: Callable[..., Any]) -> str | None:
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(parsed, ast.FunctionDef):
        return None
    parsed.decorator_list, parsed.returns = [], None
    parsed.args.defaults, parsed.args.kw_defaults = [], []
    for argument in ast.walk(parsed.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    body = parsed.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        parsed.body = body[1:]
    return ast.dump(_WithoutAnnotations().visit(parsed))


class _WithoutAnnotations(ast.NodeTransformer):
    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return ast.Assign([node.target], node.value) if node.value is not None else ast.Pass()
