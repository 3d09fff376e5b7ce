"""Case O1: nothing in the source turns bytes of others into code. Read as syntax, so that words in comments are no calls.

A rule is a ban for all of src: what is right in one file today is copied into another tomorrow.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "xmlrpc"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
BANNED_METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized"}
"""pyzmq's shorthands for pickles."""


def findings(source: str) -> list[str]:
    """What of `source` could run what it was sent, one line each."""
    return [f"line {node.lineno}: {what}" for node in ast.walk(ast.parse(source)) for what in _of_node(node)]


def _of_node(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (f"import {a.name}" for a in names if a.name.split(".")[0] in BANNED_MODULES)
        case ast.ImportFrom(module=str(module)) if module.split(".")[0] in BANNED_MODULES:
            yield f"import from {module}"
        case ast.Call():
            yield from _of_call(node)


def _of_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in BANNED_CALLS or name.rpartition(".")[2] in BANNED_METHODS:
        yield name
    if name.endswith("torch.load") and not _is(keywords.get("weights_only"), True):
        yield "torch.load without weights_only=True"
    if name in ("np.load", "numpy.load") and "allow_pickle" in keywords and not _is(keywords["allow_pickle"], False):
        yield "numpy.load with allow_pickle"
    for flag in ("shell", "trust_remote_code"):
        if flag in keywords and not _is(keywords[flag], False):
            yield f"{flag}= something else than False"
    if name.endswith("jinja2.Environment") or name == "Environment":
        yield "a jinja environment without a sandbox"


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.behaviour("O1")
def test_no_source_file_turns_bytes_into_code() -> None:
    assert len(FILES) > 100
    found = {str(file.relative_to(SOURCE)): findings(file.read_text()) for file in FILES}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "from xmlrpc.server import SimpleXMLRPCServer",
        "eval(text)",
        "exec(text)",
        "__import__(name)",
        "yaml.load(text)",
        "socket.recv_pyobj()",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(command, shell=True)",
        "subprocess.Popen(command, shell=flag)",
        "os.system(command)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "jinja2.Environment()",
    ],
)
def test_what_is_banned_would_be_found(source: str) -> None:
    assert findings(source)


@pytest.mark.parametrize(
    "source",
    ['"pickle and eval(x) in words"', "torch.load(path, weights_only=True)", "model.eval()", "run(argv, shell=False)"],
)
def test_what_is_harmless_is_not(source: str) -> None:
    assert findings(source) == []
