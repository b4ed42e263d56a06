"""The last validation of a run, which islands have left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jobs import tiny_job

from skerry.config import load
from skerry.core.standing import Standing
from skerry.launch.local import create_job
from skerry.models.gpt import GPT
from skerry.train import validate as module


def test_the_last_validation_is_on_the_device_of_the_islands_or_on_the_cpu_if_it_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "job.toml").write_text(tiny_job(1000))
    create_job(load(tmp_path / "job.toml").resolved(), tmp_path / "run")
    other = torch.device("cpu:0")  # another name of the same, as good as a GPU here
    finish, tried, full = module.finish, [], True
    to, moved = GPT.to, []

    def to_device(model: GPT, device: torch.device) -> GPT:
        moved.append(device)
        return to(model, device)

    def finish_here(folder, config, model, corpus, device, **facts):  # type: ignore[no-untyped-def]
        tried.append(device)
        assert moved[-1:] == [device] or (device.type, device.index) == ("cpu", None)
        if full and device == other:
            raise torch.AcceleratorError("no room")
        return finish(folder, config, model, corpus, device, **facts)

    ended = Standing(phase="ended", banked_tokens=1000, step=7)
    monkeypatch.setattr(GPT, "to", to_device)
    monkeypatch.setattr(module.os, "nice", lambda _: 0)
    monkeypatch.setattr(module.torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(module, "read_standing", lambda _: ended)
    monkeypatch.setattr(module, "read_span_s", lambda _: 2.0)
    monkeypatch.setattr(module, "pick_device", lambda name: other if name == "auto" else torch.device(name))
    monkeypatch.setattr(module, "finish", finish_here)
    module.watch_run(tmp_path / "run")
    assert tried == [other, torch.device("cpu")] and "no room" in caplog.text
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["step"] == 7 and 4.0 < result["validation_loss"] < 7.0, "of 256 bytes, untrained"
    full = False
    module.watch_run(tmp_path / "run")
    assert tried[2:] == [other]
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result
