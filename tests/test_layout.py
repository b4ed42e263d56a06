"""Which module may import which, that the core is pure, and that nothing here reads or writes pickles.

The sources are parsed, never imported, so an import inside a function or under `if TYPE_CHECKING` counts as well.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src"
SOURCES = sorted(SRC.glob("skerry/**/*.py"))

# A part of skerry may import its own layer and those above it in this table.
LAYERS = [
    {"errors", "clock", "cores", "config", "metrics", "durable", "checksum", "registry"},
    {"core"},
    {"tensors"},
    {"wire"},
    {"data", "admin"},
    {"syncer", "learner"},
    {"models", "train"},
    {"launch", "chaos", "observe", "plan"},
    {"cli"},
]
LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}
STRANGERS = {("syncer", "learner"), ("learner", "syncer")}  # one layer, but they meet on the wire only
FREE = {"skerry", "skerry.__main__"}  # the public face and the entry point import what they like

PURE_MODULES = {
    "__future__",
    "bisect",
    "collections",
    "copy",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "re",
    "statistics",
    "types",
    "typing",
}
"""What decisions may use: no clock, thread, file, socket, process, random number or tensor comes from these."""
PURE_PARTS = {"core", "config", "errors", "registry"}
"""Parts of skerry the core may use: settings and errors are values."""
IMPURE_BUILTINS = {"open", "print", "input", "exec", "eval", "compile", "__import__", "breakpoint", "globals", "id", "hash"}
"""Files, terminals, code from elsewhere, and what differs from one process to the next."""

PICKLING_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal"}


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported. `from a import b` gives a.b, whether b is a module or a value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                above = package[: len(package) - (node.level - 1)]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in {"import_module", "__import__"}:
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of attributes on a plain name, else an empty string."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def direction_faults(source: str, module: str, is_package: bool = False) -> list[str]:
    if module in FREE:
        return []
    part = module.split(".")[1]
    if part not in LAYER_OF:
        return [f"{module}: {part!r} has no layer; give it one in tests/test_layout.py"]
    faults = []
    for line, name in imports(ast.parse(source), module, is_package):
        root, _, rest = name.partition(".")
        if root != "skerry":
            continue
        target = rest.split(".")[0]
        if target.startswith("__") and target != "__main__":
            continue  # skerry.__version__: the package is loaded already, and plain values pull in nothing
        if target not in LAYER_OF:
            faults.append(f"{module}:{line}: imports {name}: only {sorted(FREE)} may use the public face")
        elif LAYER_OF[target] > LAYER_OF[part]:
            faults.append(f"{module}:{line}: imports {name}: {part} is below {target}")
        elif (part, target) in STRANGERS:
            faults.append(f"{module}:{line}: imports {name}: {part} and {target} do not know each other")
    return faults


def purity_faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a module of the core uses that is not a decision."""
    tree = ast.parse(source)
    faults = []
    for line, name in imports(tree, module, is_package):
        first, *rest = name.split(".")
        if first == "skerry":
            if not rest or rest[0] not in PURE_PARTS:
                faults.append(f"{module}:{line}: imports {name}, which is not pure")
        elif first not in PURE_MODULES:
            faults.append(f"{module}:{line}: imports {name}, which is not pure")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in IMPURE_BUILTINS:
            faults.append(f"{module}:{node.lineno}: uses {node.id}")
        elif isinstance(node, (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)):
            faults.append(f"{module}:{node.lineno}: waits for something")
    return faults


def pickle_faults(source: str, module: str, is_package: bool = False) -> list[str]:
    tree = ast.parse(source)
    faults = []
    for line, name in imports(tree, module, is_package):
        first, last = name.split(".")[0], name.split(".")[-1]
        if first in PICKLING_MODULES or last in PICKLING_MODULES:
            faults.append(f"{module}:{line}: imports {name}, which pickles")
        elif first == "torch" and last in {"load", "save"}:
            faults.append(f"{module}:{line}: imports {name}, which pickles; use safetensors")
    torch_names = {"torch"}  # and every name that a part of torch goes by here
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            torch_names.update(a.asname for a in node.names if a.asname and a.name.split(".")[0] == "torch")
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            torch_names.update(a.asname or a.name for a in node.names)
    for node in ast.walk(tree):
        chain = dotted(node).split(".")
        if isinstance(node, ast.Name) and node.id in PICKLING_MODULES:
            faults.append(f"{module}:{node.lineno}: uses {node.id}")
        elif isinstance(node, ast.Attribute) and node.attr in PICKLING_MODULES:
            faults.append(f"{module}:{node.lineno}: uses .{node.attr}")
        elif isinstance(node, ast.Attribute) and chain[0] in torch_names and chain[-1] in {"load", "save"}:
            faults.append(f"{module}:{node.lineno}: uses {'.'.join(chain)}, which pickles; use safetensors")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                faults.append(f"{module}:{node.value.lineno}: allow_pickle must be False")
    return faults


def test_imports_go_one_way() -> None:
    assert SOURCES, f"no sources found under {SRC}"
    faults = [
        fault
        for path in SOURCES
        for fault in direction_faults(path.read_text("utf-8"), module_name(path), path.name == "__init__.py")
    ]
    assert not faults, "\n".join(faults)


def test_the_core_has_no_clock_thread_file_socket_or_tensor() -> None:
    core = [path for path in SOURCES if path.is_relative_to(SRC / "skerry" / "core")]
    assert core, f"no core found under {SRC}"
    faults = [
        fault
        for path in core
        for fault in purity_faults(path.read_text("utf-8"), module_name(path), path.name == "__init__.py")
    ]
    assert not faults, "\n".join(faults)


def test_nothing_pickles() -> None:
    assert SOURCES, f"no sources found under {SRC}"
    faults = [
        fault
        for path in SOURCES
        for fault in pickle_faults(path.read_text("utf-8"), module_name(path), path.name == "__init__.py")
    ]
    assert not faults, "\n".join(faults)


def test_importing_skerry_does_not_import_torch() -> None:
    code = "import skerry, sys; assert skerry.__file__; assert 'torch' not in sys.modules"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module, source",
    [
        ("skerry.tensors.merge", "import skerry.wire"),
        ("skerry.tensors.merge", "from skerry import wire"),
        ("skerry.tensors.merge", "from ..wire.client import Client"),
        ("skerry.tensors.merge", "from .. import wire"),
        ("skerry.tensors.merge", "from skerry import join"),
        ("skerry.tensors.merge", "from skerry import *"),
        ("skerry.tensors.merge", "import skerry"),
        ("skerry.tensors.merge", "import torch, skerry.cli"),
        ("skerry.tensors.merge", "def late():\n    from skerry.learner import attach"),
        ("skerry.tensors.merge", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from skerry.train import loop"),
        ("skerry.tensors.merge", "import importlib\nimportlib.import_module('skerry.cli')"),
        ("skerry.errors", "from .core import merge"),
        ("skerry.syncer.server", "from skerry.learner import attach"),
        ("skerry.learner.attach", "from ..syncer import store"),
        ("skerry.train.loop", "from skerry import launch"),
        ("skerry.sim.world", "import skerry.cli"),
        ("skerry.cli", "import skerry.__main__"),
        ("skerry.cli", "import skerry.unheard_of"),
        ("skerry.unheard_of", "x = 1"),
    ],
)
def test_an_import_against_the_direction_is_found(module: str, source: str) -> None:
    assert direction_faults(source, module)


def test_a_relative_import_in_a_package_counts_from_that_package() -> None:
    assert not direction_faults("from . import syncer", "skerry.core", is_package=True)
    assert direction_faults("from .. import syncer", "skerry.core", is_package=True)
    assert direction_faults("from . import syncer", "skerry.config")


@pytest.mark.parametrize(
    "module, source",
    [
        ("skerry.tensors.merge", "import torch\nfrom skerry.errors import SkerryError\nfrom . import outer"),
        ("skerry.config", "from .errors import ConfigError\nfrom skerry import clock"),
        ("skerry.syncer.server", "from ..wire import service\nfrom ..core import syncer\nfrom .store import Store"),
        ("skerry.train.loop", "from skerry.data import corpus\nfrom skerry.learner import attach"),
        ("skerry.cli", "from skerry import __version__\nfrom skerry.launch import local"),
        ("skerry", "from .learner import join"),
        ("skerry.__main__", "from skerry.cli import main"),
    ],
)
def test_an_import_along_the_direction_passes(module: str, source: str) -> None:
    assert not direction_faults(source, module, is_package=module == "skerry")


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from time import monotonic",
        "import datetime",
        "import threading",
        "import asyncio",
        "import socket",
        "import os",
        "from pathlib import Path",
        "import random",
        "import secrets",
        "import torch",
        "import numpy as np",
        "from skerry.clock import SystemClock",
        "from skerry.tensors.fragments import Layout",
        "from ..durable import DISK",
        "from skerry import join",
        "import importlib\nimportlib.import_module('time')",
        "__import__('time').time()",
        "def late():\n    open('x').read()",
        "print(1)",
        "async def wait(): ...",
    ],
)
def test_what_is_not_a_decision_is_found(source: str) -> None:
    assert purity_faults(source, "skerry.core.rounds")


@pytest.mark.parametrize(
    "source",
    [
        "import math\nfrom dataclasses import dataclass\nfrom collections.abc import Iterable",
        "from skerry.config import SyncConfig\nfrom skerry.core import messages\nfrom . import state",
        "def handle(event, now: float) -> list: return [now]",
    ],
)
def test_what_decides_passes(source: str) -> None:
    assert not purity_faults(source, "skerry.core.rounds")


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from multiprocessing.reduction import pickle",
        "__import__('pickle')",
        "import torch\ntorch.load('x')",
        "import torch as t\nsave = t.save",
        "from torch import save",
        "from torch import serialization as s\ns.load('x')",
        "import torch.distributed.checkpoint as dcp\ndcp.save({})",
        "import io\nio.pickle.dumps(1)",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
    ],
)
def test_pickling_is_found(source: str) -> None:
    assert pickle_faults(source, "skerry.tensors.merge")


@pytest.mark.parametrize(
    "source",
    [
        "'''Never pickle, never torch.load.'''",
        "from safetensors.torch import load, save_file\nload(b'')",
        "import safetensors.torch as st\nst.save({})",
        "import numpy\nnumpy.load('x', allow_pickle=False)",
        "import json\njson.load(open('x'))",
    ],
)
def test_what_does_not_pickle_passes(source: str) -> None:
    assert not pickle_faults(source, "skerry.tensors.merge")
