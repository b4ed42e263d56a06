"""The state tables in core/transitions.py are those of the code: what docs/architecture.md draws happens, and nothing else."""

from __future__ import annotations

import ast
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from simulation.faults import simulate

from skerry.core import transitions
from skerry.core.state import FragmentProgress, LearnerState, Round, RunState
from skerry.core.transitions import LEARNER, NONE, ROUND, RUN

CORE = Path(transitions.__file__).parent
SEEDS = 8
ROUND_FIELDS = ("round", "merging_since")

Seen = set[tuple[str, str, str]]


def functions(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Every function with its name after its class's, as `co_qualname` has it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            yield f"{path.name}::{node.name}", node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{path.name}::{node.name}.{inner.name}", inner


def assigned(function: ast.AST, field: str) -> Iterator[ast.expr]:
    """What the function assigns to a field of this name."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            yield from (value for one, value in pairs if isinstance(one, ast.Attribute) and one.attr == field)


def phases_set() -> set[tuple[str, str]]:
    """(function, phase) for every assignment to a `phase` in the syncer's state machine."""
    files = [CORE / name for name in ("syncer.py", "membership.py", "rounds.py", "standing.py")]
    return {
        (where, constant.value)
        for path in files
        for where, function in functions(path)
        for value in assigned(function, "phase")
        for constant in ast.walk(value)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    }


def test_every_function_that_changes_a_phase_is_in_the_tables_and_no_other() -> None:
    listed = {(row.where, row.target) for row in (*RUN, *LEARNER) if row.where and row.source != NONE}
    assert listed == phases_set()


def test_every_function_that_opens_ends_or_merges_a_round_is_in_the_table_and_no_other() -> None:
    found = {
        where
        for where, function in functions(CORE / "rounds.py")
        if any(True for field in ROUND_FIELDS for _ in assigned(function, field))
    }
    assert {row.where for row in ROUND} == found


def state_of(gathering: Round | None) -> str:
    if gathering is None:
        return NONE
    if gathering.restores:
        return "restoring"
    if gathering.merging_since is not None:
        return "merging"
    return "gathering" if gathering.quorum_at is None else "grace"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """(source, target, function) of every change of state while the test runs. Objects that are being made do not count."""
    found: Seen = set()

    def note(before: str, after: str) -> None:
        code = sys._getframe(2).f_code
        if before != after and code.co_name != "__init__":
            found.add((before, after, f"{Path(code.co_filename).name}::{code.co_name}"))

    def set_phase(self: Any, name: str, value: Any) -> None:
        if name == "phase":
            note(vars(self).get("phase", NONE), value)
        object.__setattr__(self, name, value)

    def set_round(self: Any, name: str, value: Any) -> None:
        if name == "round" and "round" in vars(self):
            note(state_of(self.round), state_of(value))
        object.__setattr__(self, name, value)

    def set_in_round(self: Any, name: str, value: Any) -> None:
        before = state_of(self) if "void" in vars(self) else None
        object.__setattr__(self, name, value)
        if before is not None:
            note(before, state_of(self))

    for kind, setter in (
        (RunState, set_phase),
        (LearnerState, set_phase),
        (FragmentProgress, set_round),
        (Round, set_in_round),
    ):
        monkeypatch.setattr(kind, "__setattr__", setter)
    return found


def test_runs_with_faults_make_no_change_that_is_not_in_the_tables(seen: Seen) -> None:
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as root:
            simulate(seed, Path(root), False)
    assert len(seen) > 15, "the runs were not watched"
    listed = {(row.source, row.target, plain(row.where)) for row in (*RUN, *LEARNER, *ROUND)}
    assert not seen - listed


def plain(where: str) -> str:
    """The function without its class, which frames do not tell before Python 3.11."""
    file, _, name = where.partition("::")
    return f"{file}::{name.rpartition('.')[2]}"
