"""Fixtures for learners in small real runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from islands import learner_threads
from learner_runs import JOINED


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def nothing_is_left_behind() -> Iterator[None]:
    """A test that passes leaves none of our threads running; one that fails must not take others with it."""
    yield
    running = learner_threads()
    for learner in JOINED:
        learner.detach()
    JOINED.clear()
    assert not running
