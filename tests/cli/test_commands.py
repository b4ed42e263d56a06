"""The command line as a user meets it."""

from __future__ import annotations

import dataclasses
import errno
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from islands import poll, tape

from skerry.config import Config, IslandsConfig, ModelConfig, load
from skerry.errors import StoreError
from skerry.launch import local
from skerry.launch.local import create_job
from skerry.models.gpt import build_gpt
from skerry.syncer.storage.run_folder import read_identity, read_model
from skerry.train import island as island_module
from skerry.train import validate as validation
from skerry.train.job import lr_factor
from skerry.train.validate import save_model

ROOT = Path(__file__).resolve().parents[2]


def skerry(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "skerry", *arguments], capture_output=True, text=True, timeout=100)


def test_help_names_every_command_without_loading_torch() -> None:
    code = "import sys, skerry.cli\ntry: skerry.cli.main(['--help'])\nexcept SystemExit: assert 'torch' not in sys.modules"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    for command in ("train", "syncer", "learner", "create", "close", "export", "plot"):
        assert command in found.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["train", "nowhere.toml"], "no configuration file at nowhere.toml"),
        (["train", "--sync.every", "0"], "sync.every must be >= 1, got 0"),
        (["train", "--train.lr", "-1"], "train.lr must be > 0, got -1.0"),
        (["train", "--model.size", "7x", "--run", "RUN"], "model.size must be one of"),
        (["train", "--data.corpus", "folder", "--data.path", "nowhere", "--run", "RUN"], "nowhere"),
        (["train", "--data.corpus", "folder", "--run", "RUN"], "data.path must be set for corpus 'folder', got ''"),
        (["train", "--init", "nowhere.safetensors", "--run", "RUN"], "init file nowhere.safetensors cannot be read"),
        (["train", "--islands.device", "cuda:99", "--run", "RUN"], "cuda:99"),
        (["syncer", "nowhere"], "nowhere holds no run"),
        (["learner", "example.org"], "address must be host:port, got 'example.org'"),
        (["learner", "example.org:7070"], "example.org is not this machine"),
        (["export", "nowhere", "out.safetensors"], "nowhere holds no run"),
        (["plot", "nowhere"], "no plot"),
    ],
)
def test_bad_input_gets_one_clear_line_and_leaves_nothing_behind(tmp_path: Path, arguments: list[str], message: str) -> None:
    run = tmp_path / "run"
    found = skerry(*[str(run) if argument == "RUN" else argument for argument in arguments])
    assert found.returncode in (1, 2)
    assert found.stderr.startswith("skerry: ") and found.stderr.count("\n") == 1, found.stderr
    assert message in found.stderr
    assert not run.exists()


def test_settings_can_be_given_when_a_run_is_created_for_parts_by_hand(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("--islands.count", "2", "--model.layers", "1", "--sync.every", "12")
    made = skerry("create", str(ROOT / "configs" / "default.toml"), str(run), *settings)
    assert made.returncode == 0 and "training begins when 2 islands have joined" in made.stdout, made.stderr
    sync = read_identity(run).sync
    assert (sync.every, sync.start_with) == (12, 2)
    before = (run / "config.json").read_bytes()
    again = skerry("create", str(ROOT / "configs" / "default.toml"), str(run))
    assert again.returncode == 1 and "already holds a run" in again.stderr
    assert (run / "config.json").read_bytes() == before


def test_a_syncer_on_every_interface_is_not_found_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "address").write_text("0.0.0.0:7070\n")
    found = skerry("close", str(tmp_path))
    assert found.returncode == 2 and "give the name in its certificate, NAME:7070" in found.stderr


def test_what_cannot_be_written_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = skerry("train", "--run", str(tmp_path / "file" / "run"))
    assert found.returncode == 1 and found.stderr.startswith("skerry: ") and found.stderr.count("\n") == 1, found.stderr


@pytest.mark.parametrize(
    "device, gpus, visible, expected",
    [("auto", 4, None, ["0", "1", "2", "3"]), ("cuda", 2, "5,7", ["5", "7"]), ("cuda:1", 4, None, []), ("auto", 1, None, []),
     ("auto", 0, None, []), ("cpu", 4, None, [])],
)  # fmt: skip
def test_islands_take_the_gpus_of_a_machine_in_turn(monkeypatch, device: str, gpus: int, visible: str | None, expected) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = Config(islands=IslandsConfig(device=device, count=3))
    assert local._gpus(config) == expected
    parts = local._parts(config, Path("run"), "127.0.0.1:1", {f"island-{n}": "127.0.0.1:1" for n in range(3)})
    given = [w.child._environment.get("CUDA_VISIBLE_DEVICES") for w in parts if w.child.name.startswith("island-")]
    assert given == [expected[n % len(expected)] if expected else None for n in range(3)]


def test_unknown_key_in_a_file_is_named(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text("[sync]\nevry = 3\n")
    found = skerry("train", str(config))
    assert found.returncode == 2 and "sync.evry is not a setting" in found.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    assert load(path).resolved().sync.budget_tokens > 0


@pytest.mark.slow
def test_parts_started_by_hand_make_a_run(tmp_path: Path) -> None:
    """What `train` does, by hand: create, syncer, learner."""
    job = tmp_path / "job.toml"
    job.write_text(
        "[model]\nlayers = 1\nwidth = 32\nheads = 2\ncontext = 32\n[train]\ntokens = 30000\nbatch = 4\n"
        "[sync]\nfragments = 3\nevery = 6\n[islands]\ncount = 2\n"
    )
    run = tmp_path / "run"
    made = skerry("create", str(job), str(run))
    assert made.returncode == 0 and f"skerry syncer {run}" in made.stdout, made.stderr
    command = [sys.executable, "-m", "skerry", "syncer", str(run), "--address", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as syncer:
        assert syncer.stdout is not None
        address = syncer.stdout.readline().split()[-1]
        islands = [
            subprocess.Popen([sys.executable, "-m", "skerry", "learner", address, "--name", name, "--threads", "1"])
            for name in ("east", "west")
        ]
        assert [island.wait(100) for island in islands] == [0, 0]
        assert syncer.wait(30) == 0
        assert "the run has ended" in syncer.stdout.read()
    exported = skerry("export", str(run), str(tmp_path / "model.safetensors"))
    assert exported.returncode == 0 and (tmp_path / "model.safetensors").stat().st_size > 0


@pytest.mark.slow
def test_a_learner_that_is_told_to_terminate_hands_over_what_it_has_and_the_other_goes_on(tmp_path: Path) -> None:
    """A preemption notice."""
    job, run = tmp_path / "job.toml", tmp_path / "run"
    job.write_text(
        "begin_share = 0.0\n[model]\nlayers = 1\nwidth = 32\nheads = 2\ncontext = 32\n"
        "[train]\ntokens = 1_000_000_000\nbatch = 4\n[sync]\nfragments = 3\nevery = 100\n[islands]\ncount = 2\n"
    )
    assert skerry("create", str(job), str(run)).returncode == 0
    command = [sys.executable, "-m", "skerry", "syncer", str(run), "--address", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as syncer:
        assert syncer.stdout is not None
        address = syncer.stdout.readline().split()[-1]
        east, west = (
            subprocess.Popen(
                [sys.executable, "-m", "skerry", "learner", address, "--name", name, "--threads", "1"],
                stderr=subprocess.PIPE,
                text=True,
            )
            for name in ("east", "west")
        )

        def merged(name: str) -> list[int]:
            """Up to which of its own steps."""
            shares = [share for entry in tape(run, "merged") for share in entry["shares"]]
            return [share["at_step"] for share in shares if share["learner"] == name]

        poll(lambda: merged("west"), "west to be merged", timeout_s=90)
        west.terminate()
        said = west.communicate(timeout=60)[1]
        assert west.returncode == 0
        assert f"west left at step {max(merged('west'))}\n" in said, "its last step is part of the model"
        for what in ("leaving", "left"):
            assert [entry["learner"] for entry in tape(run, what)] == ["west"]
        before = len(merged("east"))
        poll(lambda: len(merged("east")) > before, "east to go on")
        assert skerry("close", address).returncode == 0
        east.communicate(timeout=60)
        assert east.returncode == 0 and syncer.wait(30) == 0


@pytest.mark.parametrize("state", ["cold", "peer"])
def test_an_island_with_a_cold_optimizer_warms_up(state: str, monkeypatch) -> None:
    """Only the first steps of run_island are looked at, so what it trains and what it joins are not real."""
    rates: list[float] = []
    learner = SimpleNamespace(slot=0, step=400, optimizer_state=state, progress=0.5, quarantined=False, name="island")
    learner.leased = lambda pools, batch: [[]] * 30
    learner.report = lambda loss: None
    learner.leave = lambda timeout_s=60.0: None
    config = Config().resolved()

    job = SimpleNamespace(model=None, optimizers=[], step_tokens=1, device="cpu", pools=[], set_lr=rates.append)
    job.read = lambda samples: ()
    job.backward = lambda: 1.0
    job.apply = lambda: None
    monkeypatch.setattr(island_module, "build_job", lambda config, region: job)
    monkeypatch.setattr(island_module, "join", lambda *arguments, **options: learner)
    before = signal.getsignal(signal.SIGTERM)
    try:
        island_module.run_island("127.0.0.1:1", "island", config)
    finally:
        signal.signal(signal.SIGTERM, before)
    usual = lr_factor(0.5, config.train)
    shares = [min(1.0, n / 20) for n in range(1, 31)] if state == "cold" else [1.0] * 30
    assert rates == pytest.approx([usual * share for share in shares])


def test_a_run_may_begin_from_given_weights(tmp_path: Path) -> None:
    config = Config(run=str(tmp_path / "run"), model=ModelConfig(layers=1, width=32, heads=2, context=32))
    given = build_gpt(config.model, 256, seed=7)
    save_model(tmp_path / "given.safetensors", dict(given.named_parameters()))
    create_job(dataclasses.replace(config, init=str(tmp_path / "given.safetensors")).resolved(), tmp_path / "run")
    begun = read_model(tmp_path / "run")
    assert all(torch.equal(begun[name], parameter) for name, parameter in given.named_parameters())


def test_a_checkpoint_that_a_full_disk_does_not_take_is_left_out(tmp_path: Path, monkeypatch, caplog) -> None:
    """The validator goes on, and what was written of it takes no more of the disk."""

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(validation, "save_file", full)
    validation._checkpoint(tmp_path / "checkpoints", 7, {"weight": torch.zeros(2)})
    assert "no checkpoint of step 7" in caplog.text and "No space left" in caplog.text
    assert not list((tmp_path / "checkpoints").iterdir())
    with pytest.raises(StoreError, match="model.safetensors cannot be written"):
        save_model(tmp_path / "model.safetensors", {"weight": torch.zeros(2)})


@pytest.mark.slow
def test_hugging_face_example_is_short_and_learns() -> None:
    example = ROOT / "examples" / "huggingface.py"
    assert len(example.read_text().splitlines()) < 40
    found = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=110)
    assert found.returncode == 0, found.stderr
    # Unbuffered, the end of a line is written by itself, and another island's line may come before it.
    said = re.findall(r"island (\d) step +(\d+) loss (\d+\.\d{3})", found.stdout)
    losses = {(island, step): float(loss) for island, step, loss in said}
    for island in ("0", "1"):
        assert losses[island, "99"] < 0.7 * losses[island, "0"]
