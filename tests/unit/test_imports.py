"""Who may import whom, which packages stay free of torch, and what never touches bytes from the network."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "headstart"

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "wire": {"core"},
    "config": {"core"},
    "kv": {"core"},
    "observe": {"core"},
    "text": {"core"},
    "transfer": {"core"},
    "scheduler": {"core", "kv", "transfer"},
    "attention": {"core"},
    "model": {"core", "attention"},
    "executor": {"core", "attention", "model"},
    "gateway": {"core", "wire", "config", "text", "observe"},
    "facade": {"core", "wire", "gateway"},
    "bench": {"core", "sim", "observe"},
    "plan": {"core", "config", "scheduler", "gateway", "observe", "sim", "bench", "worker"},
}
"""Package -> Headstart packages it may import besides itself. Those not listed (worker, launch, sim, cli) may import any."""

TORCH_FREE = ("core", "wire", "config", "kv", "observe", "text", "scheduler", "gateway", "sim", "plan")
TORCH_FREE_FILES = (
    "transfer/contract.py",
    "transfer/digest.py",
    "transfer/loopback.py",
    "transfer/nixl.py",
    "attention/plan.py",
    "model/digests.py",
    "model/info.py",
    "model/kinds.py",
    "model/refusals.py",
    "model/refused.py",
    "model/source.py",
    "model/weights.py",
    "worker/limits.py",
    "worker/loop.py",
    "worker/messenger.py",
    "worker/heartbeat.py",
    "launch/launcher.py",
    "launch/topology.py",
    "cli.py",
)
TORCH = {"torch", "transformers", "triton", "safetensors"}
NETWORK_PACKAGES = ("core", "wire", "gateway", "facade", "transfer", "worker", "launch", "scheduler")
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_ATTRIBUTES = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load")}


def files_of(package: str) -> list[Path]:
    return sorted((SOURCE / package).rglob("*.py"))


def imports_of(tree: ast.AST, package: str) -> Iterator[str]:
    """Every module named by an import statement, wherever it stands, as an absolute dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield f"headstart.{package}"  # style: absolute imports only; a relative one stays in its package
            elif node.module == "headstart":
                yield from (f"headstart.{alias.name}" for alias in node.names)
            elif node.module:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_the_table_allows(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    offenders = [
        f"{path.relative_to(SOURCE)} imports {module}"
        for path in files_of(package)
        for module in imports_of(parsed(path), package)
        if module.startswith("headstart.") and module.split(".")[1] not in allowed
    ]
    assert not offenders


def test_every_package_has_a_place_in_the_table() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages <= set(MAY_IMPORT) | {"worker", "launch", "sim"}


def test_schedulers_see_the_transfer_contract_and_no_backend() -> None:
    for path in files_of("scheduler"):
        for module in imports_of(parsed(path), "scheduler"):
            if module.startswith("headstart.transfer"):
                assert module.startswith("headstart.transfer.contract"), f"{path.name} imports {module}"


def test_transfer_backends_do_not_know_each_other() -> None:
    for path in files_of("transfer"):
        known = {module.split(".")[2] for module in imports_of(parsed(path), "transfer") if _is_transfer(module)}
        backends = known & {"loopback", "nixl", "mooncake"} - {path.stem.split("_")[0]}
        assert not backends, f"{path.name} imports {backends}"


def _is_transfer(module: str) -> bool:
    return module.startswith("headstart.transfer.")


def test_only_the_composition_root_sees_concrete_classes_of_every_kind() -> None:
    concrete = ("headstart.executor", "headstart.transfer.nixl", "headstart.transfer.mooncake")
    for path in [*files_of("worker"), *files_of("launch"), SOURCE / "cli.py"]:
        if path.name == "build.py":
            continue
        for module in imports_of(parsed(path), "worker"):
            assert not module.startswith(concrete), f"{path.name} imports {module}"


@pytest.mark.parametrize("package", TORCH_FREE)
def test_the_control_plane_never_names_torch(package: str) -> None:
    assert not torch_imports(files_of(package))


def test_torch_free_modules_of_other_packages_never_name_torch() -> None:
    assert not torch_imports([SOURCE / name for name in TORCH_FREE_FILES if (SOURCE / name).exists()])


def torch_imports(paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(SOURCE)} imports {module}"
        for path in paths
        for module in imports_of(parsed(path), "")
        if module.split(".")[0] in TORCH
    ]


def test_importing_the_control_plane_does_not_load_torch() -> None:
    names = [module_name(path) for package in TORCH_FREE for path in files_of(package)]
    names += [module_name(SOURCE / name) for name in TORCH_FREE_FILES if (SOURCE / name).exists()]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(*sorted({TORCH!r} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("package", NETWORK_PACKAGES)
def test_nothing_that_reads_the_network_unpickles_or_evaluates(package: str) -> None:
    offenders = []
    for path in files_of(package):
        tree = parsed(path)
        offenders += [
            f"{path.name} imports {module}"
            for module in imports_of(tree, package)
            if module.split(".")[0] in UNSAFE_MODULES
        ]
        offenders += [f"{path.name}:{node.lineno} calls {name}" for node, name in unsafe_calls(tree)]
    assert not offenders


def unsafe_calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            yield node, node.func.id
        elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            name = (node.func.value.id, node.func.attr)
            if name in UNSAFE_ATTRIBUTES or node.func.attr in {"recv_pyobj", "send_pyobj"}:
                yield node, ".".join(name)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in {"recv_pyobj", "send_pyobj"}:
            yield node, node.func.attr
