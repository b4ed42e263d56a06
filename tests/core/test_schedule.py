"""When fragments are due: evenly, exactly once a turn, and faster while a run begins."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from skerry.config import BeginConfig, SyncConfig
from skerry.core.schedule import Schedule, Stage


def last_steps(schedule: Schedule) -> list[tuple[Stage, int]]:
    """Each stage that is ever reached, with the step before the next one begins (far away for the last)."""
    ends = [*(stage.first_step - 1 for stage in schedule.stages[1:]), 10**9]
    return [(stage, end) for stage, end in zip(schedule.stages, ends, strict=True) if end >= stage.first_step]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    every = draw(st.integers(1, 48))
    begin = BeginConfig(
        steps=draw(st.integers(0, 400)),
        every=draw(st.integers(1, every)),
        outer_lr=draw(st.floats(0.1, 2.0)),
        outer_momentum=draw(st.floats(0.0, 0.99)),
    )
    sync = SyncConfig(every=every, begin=begin, outer_lr=draw(st.floats(0.1, 2.0)), outer_momentum=draw(st.floats(0.0, 0.99)))
    return Schedule(sync, draw(st.integers(1, 60)))


@settings(max_examples=150, deadline=None)
@given(schedule=schedules(), data=st.data())
def test_within_a_stage_each_fragment_is_due_exactly_once_in_any_turn(schedule: Schedule, data: st.DataObject) -> None:
    stage, end = data.draw(st.sampled_from(last_steps(schedule)))
    first = max(1, stage.first_step)
    assume(end - first + 1 >= stage.every)
    start = data.draw(st.integers(first, min(end - stage.every + 1, first + 500)))
    due = [fragment for step in range(start, start + stage.every) for fragment in schedule.due(step)]
    assert sorted(due) == list(range(schedule.fragments))


@pytest.mark.parametrize("every", [1, 2, 7, 24, 100])
def test_offsets_are_distinct_and_within_one_step_of_even(every: int) -> None:
    for fragments in range(1, every + 1):
        schedule = Schedule(SyncConfig(every=every), fragments)
        offset = {p: step - every for step in range(every, 2 * every) for p in schedule.due(step)}
        assert len(set(offset.values())) == fragments
        for p in range(fragments):
            assert abs(offset[p] - p * every / fragments) < 1


@pytest.mark.parametrize("every, fragments", [(1, 5), (4, 6), (24, 60), (7, 50)])
def test_more_fragments_than_steps_are_spread_as_evenly_over_the_steps(every: int, fragments: int) -> None:
    schedule = Schedule(SyncConfig(every=every), fragments)
    loads = [len(schedule.due(step)) for step in range(every, 2 * every)]
    assert sum(loads) == fragments
    assert max(loads) - min(loads) <= 1


def test_nothing_is_due_before_the_first_step() -> None:
    schedule = Schedule(SyncConfig(every=1), 3)
    assert schedule.due(0) == [] and schedule.due(-1) == []
    assert schedule.due(1) == [0, 1, 2]


def test_without_a_beginning_there_is_one_stage_with_the_final_settings() -> None:
    [stage] = Schedule(SyncConfig(every=24, outer_lr=0.7, outer_momentum=0.6), 8).stages
    assert stage == Stage(first_step=0, every=24, outer_lr=0.7, outer_momentum=0.6)


def test_the_beginning_doubles_its_turn_in_equal_stretches() -> None:
    begin = BeginConfig(steps=100, every=2, outer_lr=1.0, outer_momentum=0.0)
    stages = Schedule(SyncConfig(every=24, outer_lr=0.6, outer_momentum=0.8, begin=begin), 8).stages
    assert [(stage.first_step, stage.every) for stage in stages] == [(0, 2), (25, 4), (50, 8), (75, 16), (100, 24)]
    assert [stage.outer_lr for stage in stages] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])
    assert [stage.outer_momentum for stage in stages] == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])


@settings(max_examples=150, deadline=None)
@given(schedule=schedules())
def test_stages_move_from_the_first_settings_to_the_last_and_never_back(schedule: Schedule) -> None:
    stages = schedule.stages
    assert stages[0].first_step == 0
    steps = [stage.first_step for stage in stages]
    assert steps == sorted(steps)
    for earlier, later in itertools.pairwise(stages[:-1]):
        assert later.every == 2 * earlier.every
    if len(stages) > 1:
        assert stages[-2].every <= stages[-1].every <= 2 * stages[-2].every
    for name in ("outer_lr", "outer_momentum"):
        values = [getattr(stage, name) for stage in stages]
        # Rounding may make two neighbours differ in the last bit where the setting does not move at all.
        rising = [round(value, 12) for value in values]
        assert rising == sorted(rising) or rising == sorted(rising, reverse=True)


@settings(max_examples=100, deadline=None)
@given(schedule=schedules(), step=st.integers(0, 800))
def test_the_stage_of_a_step_is_the_last_that_has_begun(schedule: Schedule, step: int) -> None:
    begun = [stage for stage in schedule.stages if stage.first_step <= step]
    assert schedule.stage(step) == begun[-1]


@settings(max_examples=60, deadline=None)
@given(schedule=schedules(), step=st.integers(0, 600))
def test_the_last_turn_of_a_fragment_is_the_latest_step_it_was_due_at(schedule: Schedule, step: int) -> None:
    for fragment in range(schedule.fragments):
        turns = (earlier for earlier in range(step, 0, -1) if fragment in schedule.due(earlier))
        assert schedule.last_due(fragment, step) == next(turns, 0)


def test_a_beginning_that_starts_with_the_final_turn_leaves_the_turns_alone() -> None:
    begin = BeginConfig(steps=50, every=8, outer_lr=1.0, outer_momentum=0.1)
    sync = SyncConfig(every=8, outer_lr=0.5, outer_momentum=0.9, begin=begin)
    plain = dataclasses.replace(sync, begin=BeginConfig())
    for step in range(200):
        assert Schedule(sync, 3).due(step) == Schedule(plain, 3).due(step)
    assert (Schedule(sync, 3).stage(49).outer_lr, Schedule(sync, 3).stage(50).outer_lr) == (1.0, 0.5)


@settings(max_examples=100, deadline=None)
@given(schedule=schedules(), data=st.data(), overlap=st.integers(0, 12))
def test_a_merge_is_adopted_after_the_overlap_but_before_the_next_turn(
    schedule: Schedule, data: st.DataObject, overlap: int
) -> None:
    fragment = data.draw(st.integers(0, schedule.fragments - 1))
    start = data.draw(st.integers(0, 500))
    step = next(step for step in itertools.count(start + 1) if fragment in schedule.due(step))
    following = next(later for later in itertools.count(step + 1) if fragment in schedule.due(later))
    assert schedule.adopt_step(fragment, step, overlap) == min(step + overlap, following - 1)
