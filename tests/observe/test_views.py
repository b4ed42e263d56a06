"""What is shown of a run is what its records say, on every screen and whatever state the file is in."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from skerry.errors import StoreError
from skerry.metrics import MetricsTail, MetricsWriter
from skerry.observe import LiveView, PlainView, RunStatus, link_lines, open_view, plot_run, summary
from skerry.observe.frame import Frame
from skerry.observe.plot import _interpolator, _read, _smooth
from skerry.observe.status import PAUSE_S, RATE_WINDOW_S
from skerry.observe.text import duration, one_line, percent, progress_line, rate, size, tokens_of

Record = dict[str, Any]


def run(at: float, tokens: int, **more: object) -> Record:
    base = {"phase": "running", "algorithm": "decoupled", "step": 7, "budget_tokens": 2_500_000, "merges": 310}
    return {"at": at, "kind": "run", "tokens": tokens, **base, "participation": 0.97, "live": 4, "expected": 4, **more}


def island(at: float, index: int, **more: object) -> Record:
    base = {"state": "training", "step": 120, "tokens": 30_000, "tokens_per_s": 4100.0, "loss": 2.31, "weight": 0.25}
    bytes_ = {"merges": 77, "sent_bytes": 1_234_567, "received_bytes": 4_567_890}
    return {"at": at, "kind": "island", "island": f"island-{index}", **base, **bytes_, **more}


def event(at: float, what: str, **more: object) -> Record:
    return {"at": at, "kind": "event", "what": what, **more}


def status_of(*records: Record, name: str = "runs/demo") -> RunStatus:
    status = RunStatus(name)
    for record in records:
        status.apply(record)
    return status


def busy(islands: int, events: int = 8) -> RunStatus:
    """A run in full swing, with names, details and numbers as long as they come."""
    status = status_of(run(0.0, 0), run(1.0, 1_100_000, live=islands, expected=islands), name="runs/a-long-name-of-a-run")
    for index in range(islands):
        state = ("training", "away", "waiting", "left")[index % 4]
        status.apply(island(1.0, index, state=state, step=1_234_567, sent_bytes=987_654_321_000))
    for index in range(events):
        who = {"island": f"island-{index % islands}"} if islands else {}
        status.apply(event(1.0, "restarted", **who, detail="exit code 137 " * 20))
    status.apply({"at": 1.0, "kind": "validation", "tokens": 500_000, "step": 122, "loss": 2.5})
    return status


def lines_of(status: RunStatus, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), record=True, width=width, height=height, force_terminal=True)
    console.print(Frame(status))
    return console.export_text(styles=False).splitlines()


# ---------------------------------------------------------------- the file


def test_what_is_written_is_read_back_with_time_and_kind(tmp_path: Path) -> None:
    times = iter([10.5, 11.5])
    with MetricsWriter(tmp_path / "metrics.jsonl", wall=lambda: next(times)) as writer:
        writer.write("event", what="killed", detail="line\nbreak and \u2028 and ø")
        writer.write("merge", contributors={"island-0": 0.25}, asked=4)
    assert MetricsTail(tmp_path / "metrics.jsonl").read() == [
        {"at": 10.5, "kind": "event", "what": "killed", "detail": "line\nbreak and \u2028 and ø"},
        {"at": 11.5, "kind": "merge", "contributors": {"island-0": 0.25}, "asked": 4},
    ]


def test_numbers_json_lacks_become_null_at_any_depth(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m", wall=lambda: 0.0) as writer:
        writer.write("x", a=math.nan, b=[math.inf, 1.5], c={"d": -math.inf}, e=np.float32(0.5), f=np.float64("nan"))
        writer.write("x", g=np.int64(3), h=np.float32("inf"), i=(True, None), j=Path("p"))
    lines = (tmp_path / "m").read_text().splitlines()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in the file")

    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert first == {"at": 0.0, "kind": "x", "a": None, "b": [None, 1.5], "c": {"d": None}, "e": 0.5, "f": None}
    assert second == {"at": 0.0, "kind": "x", "g": 3, "h": None, "i": [True, None], "j": "p"}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=6), st.lists(st.integers(0, 400), max_size=8))
def test_a_file_read_in_any_pieces_gives_every_record_once(details: list[str], cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole, grown = Path(folder) / "whole", Path(folder) / "grown"
        with MetricsWriter(whole, wall=lambda: 1.0) as writer:
            for detail in details:
                writer.write("event", what="x", detail=detail)
        data = whole.read_bytes()
        tail, seen, start = MetricsTail(grown), [], 0
        for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
            with grown.open("ab") as file:
                file.write(data[start:cut])
            start = cut
            seen += tail.read()
            assert len(seen) == data[:cut].count(b"\n"), "a line counts once its newline is there, and not before"
        assert [record["detail"] for record in seen] == details
        assert tail.read() == []


def test_a_file_that_is_missing_damaged_or_replaced_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "m"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_bytes(b'{"at":1,"kind":"a"}\n\nnot json\n[1]\n7\n\xff\xfe\n{"at":2,"kind":"b","v":NaN}\n{"at":3')
    assert tail.read() == [{"at": 1, "kind": "a"}, {"at": 2, "kind": "b", "v": None}]
    path.write_bytes(b'{"at":4,"kind":"c"}\n')
    assert tail.read() == [{"at": 4, "kind": "c"}]


def test_a_writer_begins_on_a_full_disk_that_tore_the_last_line(tmp_path: Path, monkeypatch) -> None:
    """A syncer that is started again there must start: its islands wait for it, not for the diary."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"at":1,"kind":"run"}\n{"at":2,"ki')
    write = os.write

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    writer = MetricsWriter(path)
    writer.write("run", step=3)
    assert writer.dropped == 1
    monkeypatch.setattr(os, "write", write)
    writer.write("run", step=4)
    writer.close()
    assert [(r.get("step"), r.get("dropped_before")) for r in MetricsTail(path).read()] == [(None, None), (4, 1)]


def test_a_new_writer_does_not_lose_its_first_record_to_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"at":1,"kind":"a"}\n{"at":2,"ki')
    with MetricsWriter(path, wall=lambda: 3.0) as writer:
        writer.write("b")
    assert [record["kind"] for record in MetricsTail(path).read()] == ["a", "b"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        MetricsWriter(tmp_path / "nowhere" / "m")
    writer = MetricsWriter(tmp_path / "m")
    writer.close()
    with pytest.raises(StoreError, match="closed"):
        writer.write("late")


def test_writers_in_several_processes_do_not_interleave_and_a_reader_meets_no_half_line(tmp_path: Path) -> None:
    path, writers, each = tmp_path / "m", 4, 1000
    program = (
        "import sys; from skerry.metrics import MetricsWriter\n"
        "print(flush=True); sys.stdin.readline()  # all begin at the same moment\n"
        "with MetricsWriter(sys.argv[1]) as w:\n"
        "    for n in range(int(sys.argv[3])):\n"
        "        w.write('event', what='x', who=int(sys.argv[2]), n=n, detail=sys.argv[2] * (n * 37 % 5000))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [[sys.executable, "-c", program, str(path), str(who), str(each)] for who in range(writers)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes: list[Any] = [subprocess.Popen(command, env=environment, **pipes) for command in arguments]
    for process in processes:
        assert process.stdout.readline() == b"\n"
    for process in processes:
        process.stdin.close()
    tail, seen = MetricsTail(path), []
    while any(process.poll() is None for process in processes):
        seen += tail.read()
    seen += tail.read()
    for process in processes:
        process.stdout.close()
    assert [process.returncode for process in processes] == [0] * writers
    assert sum(1 for line in path.read_bytes().split(b"\n") if line) == writers * each, "no line was torn in two"
    for who in range(writers):
        mine = [record for record in seen if record["who"] == who]
        assert [record["n"] for record in mine] == list(range(each))
        assert all(record["detail"] == str(who) * (record["n"] * 37 % 5000) for record in mine)


# ---------------------------------------------------------------- the state


def test_what_is_unknown_or_wrong_leaves_the_state_as_it_was() -> None:
    good = [run(0.0, 100), island(0.0, 0)]
    odd: list[Record] = [
        {},
        {"kind": "run"},
        {"at": 1.0},
        {"at": "soon", "kind": "run", "tokens": 5},
        {"at": 1.0, "kind": "weather", "tokens": 5},
        {"at": 1.0, "kind": ["run"]},
        {"at": 0.0, "kind": "run", "tokens": "many", "step": None, "live": -1, "merges": True, "colour": "red"},
        {"at": 0.0, "kind": "island", "island": None},
        {"at": 0.0, "kind": "event"},
    ]
    status = status_of(*good, *odd)
    assert (status.tokens, status.step, status.live, status.merges) == (100, 7, 4, 310)
    assert list(status.islands) == ["island-0"]
    assert (status.events, status.elapsed_s) == ([], 0.0)


def test_restarts_are_counted_by_whom_they_concern() -> None:
    status = status_of(
        run(0.0, 0),
        event(1.0, "killed", island="island-2"),
        event(2.0, "restarted", island="island-2"),
        event(3.0, "joined", island="island-2"),
        event(4.0, "syncer killed"),
        event(5.0, "syncer restarted"),
        event(6.0, "restarted", island="island-0"),
    )
    assert (status.island_restarts, status.syncer_restarts) == (2, 1)
    assert status.islands["island-2"].restarts == 1
    assert "3 (2 of islands, 1 of the syncer)" in summary(status)


def test_a_killed_island_is_away_until_it_is_heard_of_again() -> None:
    status = status_of(island(0.0, 1), event(1.0, "killed", island="island-1"))
    assert status.islands["island-1"].state == "away"
    status.apply(island(2.0, 1))
    assert status.islands["island-1"].state == "training"


def test_bytes_go_on_counting_when_a_process_begins_again_at_zero() -> None:
    counts = [0, 100, 250, 0, 40, 90, 10]
    status = status_of(*(island(float(i), 0, sent_bytes=n, received_bytes=2 * n) for i, n in enumerate(counts)))
    assert (status.sent_bytes, status.received_bytes) == (250 + 90 + 10, 2 * (250 + 90 + 10))


def test_participation_is_the_mean_over_all_merges() -> None:
    chance = random.Random(3)
    pairs = [(chance.randint(0, 4), 4) for _ in range(50)] + [(0, 0)]
    merges = [
        {"at": 1.0, "kind": "merge", "contributors": {f"island-{i}": 0.5 for i in range(came)}, "asked": asked}
        for came, asked in pairs
    ]
    status = status_of(*merges)
    assert status.merges == 51
    assert status.participation == pytest.approx(np.mean([came / asked for came, asked in pairs if asked]))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 20.0), st.integers(0, 100_000)), min_size=1, max_size=40))
def test_the_rate_is_that_of_the_records_in_the_window(steps: list[tuple[float, int]]) -> None:
    times = np.cumsum([0.0, *(wait for wait, _ in steps)])
    tokens = np.cumsum([0, *(more for _, more in steps)])
    status = status_of(*(run(float(at), int(n)) for at, n in zip(times, tokens, strict=True)))
    near = times[-1] - times <= RATE_WINDOW_S
    if near.sum() < 2:
        assert status.tokens_per_s is None
    else:
        increments = np.diff(tokens[near]) / np.diff(times[near])
        assert status.tokens_per_s == pytest.approx(np.average(increments, weights=np.diff(times[near])))


def test_the_rate_of_the_run_is_the_sum_of_the_islands_rates_and_gives_the_time_left() -> None:
    rates = [4100, 3900, 1000]
    status = RunStatus()
    for second in range(40):
        for index, per_s in enumerate(rates):
            status.apply(island(float(second), index, tokens_per_s=float(per_s), tokens=per_s * second))
        status.apply(run(float(second), sum(rates) * second, budget_tokens=900_000))
    assert status.tokens_per_s == pytest.approx(sum(one.tokens_per_s or 0 for one in status.islands.values()))
    assert status.left_s == pytest.approx((900_000 - 39 * 9000) / 9000)
    assert status.progress == pytest.approx(39 * 9000 / 900_000)


def test_a_syncer_that_went_back_to_what_it_had_stored_gives_no_negative_rate() -> None:
    status = status_of(run(0.0, 1000), run(1.0, 2000), run(2.0, 1500))
    assert status.tokens_per_s is None
    status.apply(run(3.0, 1800))
    assert status.tokens_per_s == pytest.approx(300)


def test_time_nobody_ran_is_not_time_of_the_run() -> None:
    first = [run(float(second), second) for second in range(11)]
    again = [run(10.0 + 10 * PAUSE_S + second, 10 + second) for second in range(6)]
    assert status_of(*first, *again).elapsed_s == pytest.approx(10 + 5)


def test_a_run_taken_up_again_has_no_result_yet() -> None:
    result = {"at": 2.0, "kind": "result", "validation_loss": 2.1, "tokens": 5}
    status = status_of(run(1.0, 5), result, run(2.0, 5, phase="ended"))
    assert status.result is not None
    status.apply(run(900.0, 5, phase="gathering"))
    assert status.result is None


def test_the_best_validation_is_the_smallest_and_a_missing_one_does_not_count() -> None:
    losses: list[float | None] = [5.0, 2.5, None, 2.7]
    status = status_of(*({"at": 1.0, "kind": "validation", "tokens": 1, "step": 1, "loss": x} for x in losses))
    assert status.best_validation == 2.5
    assert status.latest_validation is not None
    assert status.latest_validation.loss == 2.7


# ---------------------------------------------------------------- words


def test_numbers_are_written_as_people_read_them() -> None:
    assert [rate(x) for x in (None, 812.4, 999.96, 17_900, 2.5e6)] == ["-", "812", "1.0k", "17.9k", "2.5M"]
    assert [size(x) for x in (0, 999, 1234, 999_960, 5e9)] == ["0 B", "999 B", "1.2 kB", "1.0 MB", "5.0 GB"]
    assert [duration(x) for x in (0, 59.6, 182, 3900, 183_600)] == ["0s", "1m 00s", "3m 02s", "1h 05m", "2d 03h"]
    assert [percent(x) for x in (0.0, 0.31, 0.999, 1.0)] == ["0%", "31%", "99%", "100%"]
    assert [tokens_of(770_000, 2_500_000), tokens_of(900, 0)] == ["0.77M/2.50M", "900"]


def test_a_progress_line_says_how_far_how_fast_how_good_and_who() -> None:
    losses = [2.31, 2.30, 2.35, 2.29]
    status = status_of(run(0.0, 0), run(28.0, 774_900 - 14 * 17_900), run(42.0, 774_900))
    status.apply({"at": 42.0, "kind": "validation", "tokens": 500_000, "step": 122, "loss": 2.41})
    for index, value in enumerate(losses):
        status.apply(island(42.0, index, loss=value))
    assert progress_line(status) == (
        "[  42s] 31%  0.77M/2.50M tokens  17.9k tok/s  val 2.41  4/4 islands  310 merges  97% took part"
        "  loss 2.31 2.30 2.35 2.29"
    )


def test_a_progress_line_of_many_islands_gives_the_range() -> None:
    status = status_of(run(0.0, 0), *(island(0.0, index, loss=2.0 + index) for index in range(9)))
    assert progress_line(status).endswith("loss 2.00 to 10.00, mean 6.00")


def test_the_summary_tells_the_result_and_what_it_took() -> None:
    result = {"validation_loss": 2.1, "standard_error": 0.01, "tokens": 2_500_000, "seconds": 182.0}
    status = status_of(
        run(0.0, 0), island(1.0, 0), island(1.0, 1), {"at": 2.0, "kind": "result", **result, "sample": "a\n\tb\x1b[2J"}
    )
    lines = summary(status).splitlines()
    assert lines[0].endswith("2.1000 ± 0.0100")
    assert lines[1].endswith("2.50M")
    assert lines[2].endswith("3m 02s (13.7k tok/s)")
    assert lines[3].endswith("310, 97.0% of the asked islands took part")
    assert lines[4].endswith("none")
    assert lines[5].endswith("2.5 MB sent by islands, 9.1 MB received")
    assert lines[6:] == ["sample", "  a", "      b\N{REPLACEMENT CHARACTER}[2J"]
    assert "none at the end; last 2.5000" in summary(busy(4))
    assert summary(RunStatus()).startswith("validation loss  none")


# ---------------------------------------------------------------- views


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("height", [12, 24, 40])
@pytest.mark.parametrize("islands", [0, 1, 4, 13, 40])
def test_a_frame_fits_its_terminal_and_accounts_for_every_island(width: int, height: int, islands: int) -> None:
    lines = lines_of(busy(islands), width, height)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) < height
    table = [line for line in lines if line.startswith("island-")]
    assert all(line.split()[1] in ("training", "away", "waiting", "left") for line in table), "no row wraps"
    more = [line for line in lines if line.startswith("... and ")]
    assert len(table) + (int(more[0].split()[2]) if more else 0) == islands
    assert [line.split()[0] for line in table] == [f"island-{index}" for index in range(len(table))]
    assert any("310 merges" in line for line in lines)
    assert any(percent(0.44) in line for line in lines)


def test_links_are_told_over_all_processes_of_an_island() -> None:
    link = {"contributions_bytes": 2e6, "versions_bytes": 3e6, "control_sent_bytes": 500, "control_received_bytes": 700}
    rates = {"send_bytes_per_s": 1.5e6, "receive_bytes_per_s": 2.5e6, "round_trip_s": 0.0123, "queue_s": 0.002, "waited_s": 1.0}
    said = {"link": {**link, **rates}, "steps": 90, "step_time_s": 0.1, "state": "training"}
    status = status_of(
        run(0.0, 0),
        island(1.0, 0, session="a", **said),
        island(2.0, 0, session="a", **said),
        island(3.0, 0, session="b", **{**said, "link": {**link, **rates, "waited_s": 0.0}}),
        island(3.0, 1),
    )
    assert link_lines(status).splitlines() == [
        "links            islands waited for them at most 5.3% of their time",
        "  island-0       round trip 12.3 ms; 1.5 MB/s up, 2.5 MB/s down; queued 2.0 ms; "
        "4.0 MB contributions, 6.0 MB versions, 2.4 kB control",
    ]
    assert link_lines(status_of(run(0.0, 0), island(1.0, 0))) == ""
    row = next(line for line in lines_of(status, 130, 40) if line.startswith("island-0"))
    assert row.split()[-3:] == ["12.3", "ms", "5%"]


def test_columns_are_left_out_when_narrow_and_all_are_there_at_eighty() -> None:
    wide = status_of(run(0.0, 0), *(island(0.0, index) for index in range(12)))
    titles = {width: lines_of(wide, width, 40)[3].split() for width in (30, 60, 80)}
    assert titles[80] == ["island", "state", "step", "tok/s", "loss", "weight", "merges", "sent", "received"]
    assert titles[60] == ["island", "state", "step", "tok/s", "loss", "weight"]
    assert titles[30] == ["island", "state", "loss"]
    assert lines_of(wide, 80, 40)[4].replace(" ", "") == "island-0training1204.1k2.3100.250771.2MB4.6MB"


@settings(max_examples=60, deadline=None)
@given(st.integers(20, 130), st.integers(10, 60), st.integers(0, 30), st.integers(0, 9))
def test_a_frame_fits_any_terminal(width: int, height: int, islands: int, events: int) -> None:
    lines = lines_of(busy(islands, events), width, height)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) < height


def test_a_frame_of_a_run_nothing_is_known_about_is_drawn() -> None:
    assert "starting" in lines_of(RunStatus(), 80, 24)[0]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Gone(Terminal):
    """A stream whose reader went away."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_terminal_gets_the_live_view_and_anything_else_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(open_view(Terminal()), LiveView)
    assert isinstance(open_view(io.StringIO()), PlainView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_view(Terminal()), PlainView)


def test_the_live_view_gives_the_cursor_back_and_prints_what_is_said() -> None:
    stream = Terminal()
    view = LiveView(stream)
    view.update(busy(3))
    view.say("[bold]kept as it is[/bold]")
    view.close()
    view.close()
    view.say("x" * 200)
    assert "x" * 200 in stream.getvalue(), "long lines are left to the terminal"
    assert "[bold]kept as it is[/bold]" in stream.getvalue()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


@pytest.mark.parametrize("view_class", [LiveView, PlainView])
def test_losing_the_screen_does_not_end_a_run(view_class: type[LiveView] | type[PlainView]) -> None:
    before = sys.stdout, sys.stderr
    with view_class(Gone()) as view:
        for _ in range(3):
            view.update(busy(2))
            view.say("still here")
    assert (sys.stdout, sys.stderr) == before


def test_the_plain_view_writes_no_control_characters_whatever_a_record_holds() -> None:
    stream = io.StringIO()
    view = PlainView(stream)
    status = status_of(run(0.0, 0, phase="run\x1b[31mning"), island(0.0, 0))
    status.apply(event(1.0, "kil\x07led", island="island\r-0", detail="\x1b]0;title\x07 two\nlines\x9b1m"))
    view.update(status)
    written = stream.getvalue()
    assert "two lines" in written
    assert all(char.isprintable() for line in written.split("\n") for char in line)
    assert one_line("a\x1b[1m\n b") == "a [1m b"


def test_the_plain_view_tells_each_event_and_validation_once_and_progress_now_and_then() -> None:
    stream = io.StringIO()
    view, status = PlainView(stream, interval_s=5.0), RunStatus()
    for tick in range(201):
        at = tick / 10
        status.apply(run(at, tick * 1000))
        if tick == 33:
            status.apply(event(at, "killed", island="island-2", detail="signal 9"))
        if tick == 71:
            status.apply({"at": at, "kind": "validation", "tokens": 71_000, "step": 9, "loss": 2.5})
        view.update(status)
    status.apply(run(20.1, 201_000, phase="ended"))
    view.update(status)
    lines = stream.getvalue().splitlines()
    assert [line[:7] for line in lines if " tokens  " in line] == [
        "[   0s]",
        "[   5s]",
        "[  10s]",
        "[  15s]",
        "[  20s]",
    ] + ["[  20s]"]
    assert [line for line in lines if " tokens  " not in line] == [
        "[   3s] island-2 killed: signal 9",
        "[   7s] validation loss 2.5000 at 71.00k tokens, step 9",
    ]
    assert "ended" in lines[-1]


def test_the_plain_view_writes_to_a_stream_that_knows_ascii_only() -> None:
    raw = io.BytesIO()
    view = PlainView(io.TextIOWrapper(raw, encoding="ascii"))
    view.close()
    view.say("2.1 ± 0.1")
    assert raw.getvalue() == b"2.1 ? 0.1\n"


# ---------------------------------------------------------------- the plot


def write_run(path: Path, seconds: int = 60, islands: int = 4) -> None:
    chance, now = random.Random(0), [1000.0]
    with MetricsWriter(path, wall=lambda: now[0]) as writer:
        for second in range(seconds):
            now[0] += 1.0
            tokens = 40_000 * second
            loss = 2.0 + 3.0 * math.exp(-second / 12)
            writer.write("run", phase="running", algorithm="decoupled", tokens=tokens, budget_tokens=2_400_000)
            for index in range(islands):
                if index == 1 and 20 <= second < 35:
                    continue
                value = loss + chance.gauss(0, 0.05)
                sent = 50_000 * second
                writer.write("island", island=f"island-{index}", state="training", loss=value, sent_bytes=sent)
            if second == 20:
                writer.write("event", what="killed", island="island-1")
            if second == 30:
                writer.write("event", what="lost", island="island-1")
            if second == 34:
                writer.write("event", what="restarted", island="island-1")
            if second in (40, 44):
                writer.write("event", what="syncer killed" if second == 40 else "syncer restarted")
            if second % 10 == 0:
                writer.write("validation", tokens=tokens, step=second, loss=loss + 0.1)
        writer.write("result", validation_loss=2.05, standard_error=0.01, tokens=2_400_000, seconds=60.0, sample="")


def png_chunks(data: bytes) -> dict[bytes, bytes]:
    """The chunks of a PNG, each checked against its checksum."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks: dict[bytes, bytes] = {}
    place = 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        (checksum,) = struct.unpack(">I", data[place + 8 + length : place + 12 + length])
        assert checksum == zlib.crc32(kind + body)
        chunks[kind] = chunks.get(kind, b"") + body
        place += 12 + length
    return chunks


@pytest.mark.parametrize("islands", [1, 12])
def test_a_plot_is_a_whole_png_with_something_in_it(tmp_path: Path, islands: int) -> None:
    pytest.importorskip("matplotlib")
    write_run(tmp_path / "m", islands=islands)
    assert plot_run(tmp_path / "m", tmp_path / "run.png")
    chunks = png_chunks((tmp_path / "run.png").read_bytes())
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    assert 800 <= width <= 2400
    assert 500 <= height <= 1600
    pixels = zlib.decompress(chunks[b"IDAT"])
    assert len(pixels) == height * (1 + 4 * width)
    assert len(set(pixels)) > 100, "lines and words, not an empty sheet"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "run.png"]


def test_a_plot_needs_matplotlib_and_something_to_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plot_run(tmp_path / "missing", tmp_path / "run.png")
    (tmp_path / "m").write_text(json.dumps(run(0.0, 0)) + "\n")
    assert not plot_run(tmp_path / "m", tmp_path / "run.png")
    write_run(tmp_path / "m")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not plot_run(tmp_path / "m", tmp_path / "run.png")
    assert not (tmp_path / "run.png").exists()


def test_one_failure_is_marked_once_and_breaks_only_the_line_of_its_island(tmp_path: Path) -> None:
    write_run(tmp_path / "m")
    story = _read(MetricsTail(tmp_path / "m").read())
    assert [mark for _, mark in story.marks] == ["island down", "island restarted", "syncer down", "syncer restarted"]
    breaks = {name: sum(math.isnan(loss) for _, loss in line) for name, line in story.losses.items()}
    assert breaks == {"island-0": 0, "island-1": 1, "island-2": 0, "island-3": 0}
    assert story.sent[-1][1] == 4 * 50_000 * 59
    assert len(story.validations) == 6


def test_tokens_at_a_time_are_interpolated() -> None:
    chance = random.Random(1)
    track = [(float(at), float(chance.randint(0, 10**6))) for at in range(0, 50, 5)]
    tokens_at = _interpolator(track)
    for at in [-3.0, 0.0, 2.5, 5.0, 44.9, 45.0, 99.0]:
        assert tokens_at(at) == pytest.approx(np.interp(at, [t for t, _ in track], [n for _, n in track]))


def test_smoothing_keeps_straight_lines_straight_and_does_not_cross_a_break() -> None:
    noise = random.Random(2)
    level = [(float(i), 1.0) for i in range(300)] + [(300.0, math.nan)] + [(float(i), 5.0) for i in range(301, 600)]
    assert [pair for pair in _smooth(level) if not math.isnan(pair[1])] == [p for p in level if not math.isnan(p[1])]
    rough = [(float(i), noise.gauss(2.0, 1.0)) for i in range(600)]
    assert np.std([y for _, y in _smooth(rough)]) < 0.5 * np.std([y for _, y in rough])
    assert [at for at, _ in _smooth(rough)] == [at for at, _ in rough]
