"""Run a matrix of training runs from a TOML file and append one JSON line for each to results/quality/NAME.jsonl.

    python benchmarks/quality/run.py benchmarks/quality/begin.toml [--only PATTERN] [--minutes 9]

A line that is there already is not run again, so an interrupted matrix goes on where it was. The file has a [base] table
(settings as in a config file), then [[arm]] tables: `name`, dotted settings to change, optional `seeds`, `conditions` and
`grid` (lists to combine). Every arm sees the same data in the same order and ends at the same number of tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from sequential import Conditions, DeviceWindows, SequentialRun, Stepper, measure, run_data_parallel

from skerry.config import Config, from_mapping, tomllib
from skerry.data.corpus import load_corpus
from skerry.data.windows import Windows

ROOT = Path(__file__).resolve().parents[2]


def arms(matrix: dict[str, Any]) -> list[tuple[str, Config, Conditions]]:
    found = []
    for arm in matrix["arm"]:
        grid = arm.get("grid", {})
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            for seed in arm.get("seeds", matrix.get("seeds", [0])):
                settings = json.loads(json.dumps(matrix["base"]))
                for key, value in {**arm.get("set", {}), **chosen, "train.seed": seed}.items():
                    put(settings, key, value)
                name = "/".join([arm["name"], *(f"{k.split('.')[-1]}={v}" for k, v in chosen.items()), f"seed={seed}"])
                conditions = dict(arm.get("conditions", {}))
                if "step_times" in conditions:
                    conditions["step_times"] = tuple(conditions["step_times"])
                found.append((name, from_mapping(Config, settings), Conditions(**conditions)))
    return found


def put(settings: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        settings = settings.setdefault(part, {})
    settings[last] = value


def as_recorded(config: Config, matrix: dict[str, Any]) -> dict[str, Any]:
    """The settings, with the matrix's name for the corpus instead of the place it was read from."""
    settings: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    settings["data"]["path"] = matrix["corpus"]
    return settings


def share_out(workers: int) -> None:
    """Start this command several times over; each process takes the next run nobody has taken."""
    with tempfile.TemporaryDirectory() as claims:
        command = [sys.executable, *sys.argv, "--claims", claims]
        for process in [subprocess.Popen(command) for _ in range(workers)]:
            process.wait()


def claimed(claims: Path | None, name: str) -> bool:
    """Whether this process may do that run."""
    if claims is None:
        return True
    try:
        (claims / name.replace("/", ",")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("matrix", type=Path)
    parser.add_argument("--only", default="*")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--corpus-path", help="folder to read instead of the matrix's data.path")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the matrix and the GPU")
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.workers > 1 and options.claims is None:
        share_out(options.workers)
        return
    started = time.monotonic()
    matrix = tomllib.loads(options.matrix.read_text())
    matrix["corpus"] = matrix["base"].get("data", {}).get("path", "")
    if options.corpus_path:
        put(matrix["base"], "data.path", options.corpus_path)
    out = options.out or ROOT / "results" / "quality" / f"{options.matrix.stem}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["name"] for line in out.read_text().splitlines()} if out.exists() else set()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    corpus_for: dict[Any, Any] = {}
    stepper_for: dict[Any, Stepper] = {}
    last_s = 0.0
    for name, config, conditions in arms(matrix):
        if name in done or not fnmatch.fnmatch(name, options.only):
            continue
        if (time.monotonic() - started + last_s) / 60 > options.minutes:
            print("out of time; the rest waits for the next call", flush=True)
            break
        if not claimed(options.claims, name):
            continue
        if config.data not in corpus_for:
            corpus_for.clear()
            corpus_for[config.data] = load_corpus(config.data, config.model.context)
        corpus = corpus_for[config.data]
        parallel = config.algorithm == "dp"
        batch = config.train.batch * (config.islands.count if parallel else 1)
        fixed = dataclasses.replace(config.train, seed=0, tokens=1, warmup=0.0, lr=1.0, batch=1)
        shape = (config.model, fixed, batch)
        if shape not in stepper_for:
            if device.type == "cpu":
                stepper_for.clear()
            stepper_for[shape] = Stepper(config, corpus, device, batch)
        stepper = stepper_for[shape]
        windows = DeviceWindows(
            Windows(corpus.train, config.model.context, config.train.seed), corpus, config.model.context, device
        )
        began = time.monotonic()
        line: dict[str, Any] = {"name": name, "algorithm": config.algorithm, "islands": config.islands.count}
        if parallel:
            line["tokens"] = run_data_parallel(config, stepper, windows)
        else:
            run = SequentialRun(config, stepper, windows, conditions)
            run.run()
            run.load_global()
            line.update(
                tokens=run.core.tokens,
                merges=run.core.merges,
                mean_members=sum(run.members) / max(len(run.members), 1),
                sent_bytes_per_step=run.sent_bytes / max(run.core.step, 1) / config.islands.count,
                lost_steps=run.lost_steps,
            )
        found = measure(config, stepper, corpus)
        line.update(
            loss=found.loss,
            standard_error=found.standard_error,
            parameters=sum(p.numel() for p in stepper.model.parameters()),
            seconds=time.monotonic() - began,
            device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            config=as_recorded(config, matrix),
            conditions=dataclasses.asdict(conditions),
        )
        last_s = line["seconds"]
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{name:60s} loss {found.loss:.4f} ±{found.standard_error:.4f}  {line['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
