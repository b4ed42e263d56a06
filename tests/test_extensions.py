"""Extension points: things registered from outside the package, chosen by name, in whole runs and one by one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from islands import poll, tape
from jobs import tiny_job
from safetensors.torch import load_file
from torch import nn

import skerry
from skerry import registry
from skerry.admin import close_run
from skerry.chaos.driver import Driver
from skerry.chaos.kinds import FAULTS, Kind
from skerry.chaos.parse import parse_faults
from skerry.config import SyncConfig, from_json, to_json
from skerry.core.guard import GUARDS
from skerry.core.messages import Contributed
from skerry.core.standing import Standing
from skerry.core.syncer import SyncerCore
from skerry.errors import ConfigError
from skerry.metrics import MetricsTail, MetricsWriter
from skerry.registry import Registry
from skerry.syncer import sinks
from skerry.syncer.extensions import check_extensions
from skerry.syncer.sinks import SINKS, SinkFeeder
from skerry.tensors.codecs.codec import CODECS, codec
from skerry.tensors.merge import MERGE_RULES, OUTER_OPTIMIZERS, outer_optimizer

ROOT = Path(__file__).resolve().parent.parent


def examples() -> str:
    """The code of CONTRIBUTING.md's section on extension points, as one module."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Extension points")[1].split("\n## ")[0]
    found = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(found) == 6
    return "\n\n".join(found)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder for plugins of this process, which has loaded none yet; what they register is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_plugins", registry._Plugins())
    every = (CODECS, MERGE_RULES, OUTER_OPTIMIZERS, GUARDS, SINKS, FAULTS)
    for one in every:
        monkeypatch.setattr(one, "_entries", dict(one._entries))
    before = set(sys.modules)
    yield tmp_path
    codec.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith("plugin_"):
            del sys.modules[name]


# ------------------------------------------------------------ a whole run


@pytest.mark.timeout(300)
def test_a_run_with_one_of_each_from_outside_the_package_trains_and_replays(tmp_path: Path) -> None:
    (tmp_path / "plugin_examples.py").write_text(examples())
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "SKERRY_PLUGINS": "plugin_examples"}
    sync = {"fragments": 3, "every": 12, "send": "fp16", "publish": "fp16", "merge": "median", "outer": "adagrad"}
    sync |= {"outer_lr": 0.002, "guard": "ceiling", "options": ["ceiling=20"], "sinks": ["losses"]}
    islands = {"threads": 1, "shards": 1}
    (tmp_path / "job.toml").write_text(tiny_job(10**9, sync=sync, islands=islands, train={"warmup": 0.0}))
    run, skerry_command = tmp_path / "run", [sys.executable, "-m", "skerry"]
    chaos = ["--chaos", "nap island-1 @ step 20 for 1s, explode island-2 300x @ step 40"]
    with (tmp_path / "output").open("w") as output:
        command = [*skerry_command, "train", str(tmp_path / "job.toml"), "--run", str(run), *chaos]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def enough() -> bool:
        assert process.poll() is None, (tmp_path / "output").read_text()
        if not (run / "address").exists():
            return False
        refused = any("above 20" in record["reason"] for record in tape(run, "unhealthy"))
        healed = any(record["fault"] == "nap" for record in tape(run, "fault_healed"))
        return refused and healed and len(tape(run, "merged")) > 20

    try:
        poll(enough, "merges, a healed fault and a refused contribution", 100)
        close_run((run / "address").read_text().strip(), None)
        assert process.wait(60) == 0, (tmp_path / "output").read_text()
    finally:
        process.kill()
    assert "island-0" in (run / "losses.csv").read_text()
    newest = load_file(max((run / "fragments").glob("0000-*")))
    assert set(newest) == {"values", "squares", "shown"} and newest["squares"].any()
    replayed = subprocess.run(
        [*skerry_command, "replay", str(run)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert replayed.returncode == 0 and "bit for bit" in replayed.stdout, replayed.stderr


def test_a_learner_without_the_plugin_says_what_is_missing_and_for_which_run(plugins: Path, start_syncer: Any) -> None:
    (plugins / "plugin_examples.py").write_text(examples())
    __import__("plugin_examples")
    folder = skerry.create(plugins / "run", nn.Linear(4, 4), SyncConfig(fragments=1, send="fp16"))
    syncer = start_syncer(folder)
    code = (
        "import sys, torch, skerry\nfrom skerry.errors import ConfigError\n"
        "model = torch.nn.Linear(4, 4)\n"
        "try:\n"
        "    skerry.join(sys.argv[1], model, torch.optim.SGD(model.parameters(), lr=0.1), timeout_s=60)\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    joined = subprocess.run([sys.executable, "-c", code, syncer.address], capture_output=True, text=True, timeout=100)
    run_id = json.loads((folder / "run.json").read_text())["run_id"]
    assert joined.returncode == 0, joined.stderr
    [line] = joined.stdout.splitlines()
    assert line.startswith(f"run {run_id} at {syncer.address}: sync.send must be one of fp32, bf16") and "'fp16'" in line
    assert line.endswith("If this codec comes from a plugin, install it on this machine, or name its module in SKERRY_PLUGINS")


# ------------------------------------------------------------ names and plugins


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"send": "zip"}, "sync.send must be one of fp32, bf16, fp8, int8, int4, e3m0, topk1, topk3, got 'zip'. If"),
        ({"publish": "int44"}, "sync.publish must be one of .*, got 'int44'. Did you mean 'int4'"),
        ({"merge": "median"}, "sync.merge must be one of radial, mean, got 'median'. Did you mean 'mean'"),
        ({"outer": "nestrov"}, "sync.outer must be one of nesterov, got 'nestrov'. Did you mean 'nesterov'"),
        ({"guard": "norms"}, "sync.guard must be one of norm, got 'norms'. Did you mean 'norm'"),
        ({"sinks": ("wandb",)}, r"sync.sinks must be one of \(none here\), got 'wandb'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(settings: dict[str, Any], message: str, plugins: Path) -> None:
    with pytest.raises(ConfigError, match=f"^runs/demo: {message}"):
        check_extensions(SyncConfig(**settings), "runs/demo")
    with pytest.raises(ConfigError, match=message):
        skerry.create(plugins / "run", nn.Linear(2, 2), SyncConfig(**settings))
    assert not (plugins / "run").exists()


def test_a_name_can_be_taken_only_once() -> None:
    things: Registry[type] = Registry("thing")
    things.register("one")(int)
    with pytest.raises(ConfigError, match="thing 'one' is registered twice"):
        things.register("one")(str)
    assert things.get("one") is int


def test_plugins_are_imported_once_and_only_for_names_that_are_not_built_in(
    plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plugins / "plugin_examples.py").write_text(examples())
    (plugins / "plugin_count.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('imported').open('a').write('x')\n"
    )
    monkeypatch.setenv("SKERRY_PLUGINS", " plugin_count, plugin_examples")
    assert codec("bf16").name == "bf16" and not (plugins / "imported").exists()
    assert codec("fp16").name == "fp16"
    assert parse_faults("nap island-0 for 1s")[0].words == "nap island-0 for 1s"
    with pytest.raises(ConfigError):
        codec("zip")
    assert (plugins / "imported").read_text() == "x"


def test_an_installed_package_brings_its_plugins_as_entry_points(plugins: Path) -> None:
    (plugins / "plugin_examples.py").write_text(examples())
    about = plugins / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[skerry.plugins]\nmine = plugin_examples\n")
    assert codec("fp16").size_bytes(10) == 20


@pytest.mark.parametrize(
    "source, why",
    [
        ("import plugin_that_is_missing", "ModuleNotFoundError: No module named 'plugin_that_is_missing'"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines"),
        ("import skerry.tensors.codecs.codec as c\nc.CODECS.add('bf16', None)", "codec 'bf16' is registered twice"),
    ],
)
def test_a_plugin_that_cannot_be_imported_gives_one_line(
    source: str, why: str, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plugins / "plugin_broken.py").write_text(source)
    monkeypatch.setenv("SKERRY_PLUGINS", "plugin_broken")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"^plugin plugin_broken \(SKERRY_PLUGINS\) cannot be imported: ") as caught:
            codec("fp16")
        assert why in str(caught.value) and "\n" not in str(caught.value)


def test_a_plugin_that_is_not_found_is_to_be_put_on_the_path(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_PLUGINS", "plugin_elsewhere")
    with pytest.raises(ConfigError, match=r"No module named 'plugin_elsewhere'; put its folder on PYTHONPATH$"):
        codec("fp16")


def test_a_codec_must_go_by_the_name_it_is_registered_under(plugins: Path) -> None:
    CODECS.add("mine", lambda: codec("int8"))
    with pytest.raises(ConfigError, match="the codec registered as 'mine' calls itself 'int8'"):
        codec("mine")


def test_a_fault_must_have_a_unit_that_plans_can_say() -> None:
    with pytest.raises(ConfigError, match="the unit of fault 'flood' must be one of x, mbps, ms, bytes, s, got 'litres'"):
        Kind("flood", amount="much", unit="litres")


def test_a_fault_that_cannot_be_injected_is_recorded_and_the_run_goes_on(plugins: Path) -> None:
    def refuse(parts: Any, part: str, amount: float) -> None:
        raise PermissionError(f"{part} is not mine")

    class Supervised:
        def runs(self, part: str) -> bool:
            return True

    class Unheard:
        def write(self, record: object) -> None: ...
        def close(self) -> None: ...

    FAULTS.add("evict", Kind("evict", inject=refuse))
    (plugins / "chaos").mkdir()
    with MetricsWriter(plugins / "metrics.jsonl") as metrics:
        faults: Any = parse_faults("evict island-0 @ 0s for 1s")
        driver = Driver(faults, 1, plugins, Supervised(), metrics, Unheard(), None)  # type: ignore[arg-type]
        for now in (5.0, 7.0):
            driver.poll(now, running=True, step=0)
    events = [record for record in MetricsTail(plugins / "metrics.jsonl").read() if record["kind"] == "event"]
    assert [event["what"] for event in events] == ["fault", "fault failed", "healed"]
    assert events[1]["detail"] == "evict island-0 @ 0s for 1s: PermissionError: island-0 is not mine"


# ------------------------------------------------------------ what is stored


def test_the_default_stores_what_it_always_did(tmp_path: Path) -> None:
    folder = skerry.create(tmp_path / "run", nn.Linear(3, 2), SyncConfig(fragments=1))
    assert set(load_file(folder / "fragments" / "0000-00000000.safetensors")) == {"values", "momentum"}


def test_settings_from_before_there_were_extensions_are_read() -> None:
    old = json.loads(to_json(SyncConfig(every=7)))
    for name in ("outer", "guard", "sinks", "options"):
        del old[name]
    assert from_json(SyncConfig, json.dumps(old)) == SyncConfig(every=7)


def test_an_optimizers_state_may_not_take_the_names_of_version_files(plugins: Path) -> None:
    class Greedy:
        def fresh(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"shown": values}

        def step(self, *_: object) -> Any:
            raise AssertionError

    OUTER_OPTIMIZERS.add("greedy", lambda sync: Greedy())
    with pytest.raises(ConfigError, match="outer optimizer 'greedy' must not call its state 'shown'"):
        outer_optimizer(SyncConfig(outer="greedy"))


def test_a_guard_goes_on_after_a_restart(plugins: Path) -> None:
    class Fickle:
        """Refuses every other contribution."""

        def __init__(self, sync: SyncConfig) -> None:
            self.seen = 0

        def judge(self, offer: Contributed) -> str | None:
            self.seen += 1
            return None if self.seen % 2 else "not today"

        def summary(self) -> Any:
            return {"seen": self.seen}

        def restore(self, summary: Any) -> None:
            self.seen = summary["seen"]

    GUARDS.add("fickle", Fickle)
    sync = SyncConfig(guard="fickle")
    core, offer = SyncerCore(sync, 2), Contributed("island-0", 1, 1, 0, 1, 1, norm=1.0)
    assert core.run.guards[1].judge(offer) is None
    standing = Standing.from_json(json.loads(json.dumps(core.standing().to_json())))
    again = SyncerCore(sync, 2, standing=standing)
    assert again.run.guards[1].judge(offer) == "not today" and again.run.guards[0].judge(offer) is None


# ------------------------------------------------------------ sinks


class Collector:
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.closed = False

    def write(self, record: dict[str, Any]) -> None:
        self.seen.append(record)

    def close(self) -> None:
        self.closed = True


def test_a_sink_gets_the_records_of_every_process_from_now_on(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "POLL_S", 0.01)
    collector = Collector()
    SINKS.add("collect", lambda folder, sync: collector)
    with MetricsWriter(plugins / "metrics.jsonl") as writer:
        writer.write("run", step=1)
        feeder = SinkFeeder(plugins, SyncConfig(sinks=("collect",)))
        for step in (2, 3):
            writer.write("run", step=step)
        feeder.close()
    assert [record["step"] for record in collector.seen] == [2, 3] and collector.closed


def test_a_sink_that_fails_is_reported_once_and_dropped(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "POLL_S", 0.01)
    collector = Collector()

    class Broken(Collector):
        def write(self, record: dict[str, Any]) -> None:
            raise RuntimeError("no more room")

    def unreachable(folder: Path, sync: SyncConfig) -> Collector:
        raise OSError("no such host")

    SINKS.add("collect", lambda folder, sync: collector)
    SINKS.add("broken", lambda folder, sync: Broken())
    SINKS.add("unreachable", unreachable)
    feeder = SinkFeeder(plugins, SyncConfig(sinks=("broken", "unreachable", "collect")))
    with MetricsWriter(plugins / "metrics.jsonl") as writer:
        for step in range(5):
            writer.write("run", step=step)
        poll(lambda: sum(record["kind"] == "run" for record in collector.seen) == 5, "all records")
    feeder.close()
    events = [record["detail"] for record in MetricsTail(plugins / "metrics.jsonl").read() if record["kind"] == "event"]
    assert sorted(events) == ["broken: RuntimeError: no more room", "unreachable: OSError: no such host"]


def test_a_sink_that_hangs_holds_up_nobody(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "POLL_S", 0.01)
    monkeypatch.setattr(sinks, "CLOSE_S", 0.1)
    entered, let_go = threading.Event(), threading.Event()

    class Hanging(Collector):
        def write(self, record: dict[str, Any]) -> None:
            entered.set()
            let_go.wait(60)

    SINKS.add("hanging", lambda folder, sync: Hanging())
    feeder = SinkFeeder(plugins, SyncConfig(sinks=("hanging",)))
    with MetricsWriter(plugins / "metrics.jsonl") as writer:
        writer.write("run", step=1)
        assert entered.wait(60)
        feeder.close()
        writer.write("run", step=2)
    let_go.set()
    feeder._thread.join(60)
