"""Builds Headstart. With HEADSTART_COMPILE=1 mypyc compiles what serves a request without touching a tensor, and the
simulator, which runs the same code: see docs/decisions/008-a-compiled-form.md."""

import os
from pathlib import Path

from setuptools import Extension, setup

COMPILED = {
    "core": ("arrays", "clock", "layout", "sequence"),
    "kv": ("cache", "eviction", "ledger", "lru_heap", "tenant_quota", "tree"),
    "scheduler": ("*",),
    "gateway": ("cluster", "dispatch", "entrance", "flush", "policy", "prefix_index", "registry", "router", "state", "unfinished"),
    "transfer": ("contract", "digest", "loopback", "pages"),
    "worker": ("loop",),
    "sim": ("blank", "build", "client", "clock", "cost", "executor", "launcher", "leap", "network", "reading", "timeline", "unsaid", "watermarks", "worker", "world"),
}  # fmt: skip
"""Package -> its compiled modules. Not those whose classes msgspec decodes: it would not know what is in their fields."""
LEFT_OUT = {"__init__", "limits"}


def compiled() -> list[Extension]:
    from mypyc.build import mypycify

    modules: list[Path] = []
    for part, names in COMPILED.items():
        for name in names:
            found = sorted(Path("src/headstart", part).glob(f"{name}.py"))
            if not found:
                raise FileNotFoundError(f"there is no {part}/{name}.py to compile")
            modules += (path for path in found if path.stem not in LEFT_OUT)
    return mypycify(["--follow-imports=silent", *map(str, modules)], opt_level="3", debug_level="0")


setup(ext_modules=compiled() if os.environ.get("HEADSTART_COMPILE") == "1" else [])
