"""Run matrices of training runs from TOML files and append one JSON line for each run to results/quality/NAME.jsonl.

    python benchmarks/quality/run.py benchmarks/quality/begin_11m.toml [MORE.toml ...] [--only PATTERN] [--workers 4]

Runs that already have a line are skipped, so an interrupted matrix can be resumed. The file has a [base] table (settings as in
a config file), then [[arm]] tables: `name`, dotted settings to change, and optional `seeds`, `conditions` and `grid` (lists to
combine). Every arm sees the same data in the same order and ends at the same number of tokens.

`subject`, in the file or an arm, selects what is trained (subjects.py; default "text"). With `curve` = N, in the file or an
arm, a line also has N points [tokens, loss] of the global model along the run, measured on eval.tokens.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from sequential import Conditions, SequentialRun, Stepper, run_data_parallel
from subjects import GlyphSubject, Subject, build_subject, fitted, subject_key

from skerry.config import Config, from_mapping, tomllib
from skerry.errors import SkerryError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Arm:
    """One run of the matrix."""

    name: str
    subject: str
    config: Config
    conditions: Conditions
    curve: int
    """Number of points of the loss curve; 0 for none."""

    @property
    def parallel(self) -> bool:
        return self.config.algorithm == "dp"

    @property
    def batch(self) -> int:
        """Samples per step on the device."""
        return self.config.train.batch * (self.config.islands.count if self.parallel else 1)

    @property
    def shape(self) -> Any:
        """Runs with the same shape can share one compiled training step."""
        fixed = dataclasses.replace(self.config.train, seed=0, tokens=1, warmup=0.0, lr=1.0, batch=1)
        return self.config.model, fixed, self.batch


def arms(matrix: dict[str, Any]) -> list[Arm]:
    found = []
    for arm in matrix["arm"]:
        grid = arm.get("grid", {})
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            for seed in arm.get("seeds", matrix.get("seeds", [0])):
                settings = json.loads(json.dumps(matrix["base"]))
                conditions = dict(arm.get("conditions", {}))
                for key, value in {**arm.get("set", {}), **chosen, "train.seed": seed}.items():
                    put({"conditions": conditions} if key.startswith("conditions.") else settings, key, value)
                name = "/".join([arm["name"], *(f"{k.split('.')[-1]}={v}" for k, v in chosen.items()), f"seed={seed}"])
                if "step_times" in conditions:
                    conditions["step_times"] = tuple(conditions["step_times"])
                subject = arm.get("subject", matrix.get("subject", "text"))
                config = fitted(subject, from_mapping(Config, settings))
                curve = arm.get("curve", matrix.get("curve", 0))
                found.append(Arm(name, subject, config, Conditions(**conditions), curve))
    return found


def put(settings: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        settings = settings.setdefault(part, {})
    settings[last] = value


def as_recorded(config: Config, matrix: dict[str, Any]) -> dict[str, Any]:
    """The settings, with the matrix's path of the corpus instead of the one given by --corpus-path."""
    settings: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    settings["data"]["path"] = matrix["corpus"]
    return settings


class Curve:
    """Losses of the global model at evenly spaced token counts. Measuring does not change the run."""

    def __init__(self, points: int, config: Config, stepper: Stepper) -> None:
        self._config, self._stepper = config, stepper
        # The last point is measured at the end of the run, which is after the budget is spent.
        self._to_come = [config.train.tokens * k // points for k in range(1, points)]
        self.points: list[tuple[int, float]] = []

    def due(self, tokens: int) -> bool:
        return bool(self._to_come) and tokens >= self._to_come[0]

    def measure(self, tokens: int) -> None:
        """Measure the model in the stepper."""
        found = self._stepper.subject.validation(self._stepper.model, self._config.eval.tokens)
        self.points.append((tokens, found.loss))
        self._to_come = [moment for moment in self._to_come if moment > tokens]


def train(arm: Arm, stepper: Stepper) -> dict[str, Any]:
    """Do one run and return its result line. The trained model stays in the stepper."""
    config, samples = arm.config, stepper.subject.samples(arm.config.train.seed)
    curve = Curve(arm.curve, config, stepper) if arm.curve else None
    line: dict[str, Any] = {"name": arm.name, "subject": arm.subject, "data": stepper.subject.fingerprint}
    line.update(algorithm=config.algorithm, islands=config.islands.count)

    def look(tokens: int) -> None:
        if curve is not None and curve.due(tokens):
            curve.measure(tokens)

    def look_at_global(run: SequentialRun) -> None:
        if curve is not None and curve.due(run.core.tokens):
            # Safe: islands load their own weights into the stepper before each step.
            run.load_global()
            curve.measure(run.core.tokens)

    if arm.parallel:
        line["tokens"] = run_data_parallel(config, stepper, samples, look)
    else:
        run = SequentialRun(config, stepper, samples, arm.conditions)
        run.run(look_at_global)
        run.load_global()
        line.update(
            tokens=run.core.tokens,
            steps=run.core.step,
            merges=run.core.run.merges,
            mean_members=sum(run.members) / max(len(run.members), 1),
            mean_age=sum(age * count for age, count in run.ages.items()) / max(run.ages.total(), 1),
            sent_bytes_per_step=run.sent_bytes / max(run.core.step, 1) / config.islands.count,
            peak_bytes_per_step=run.peak_bytes_per_step,
            lost_steps=run.lost_steps,
        )
    if curve is not None:
        curve.measure(line["tokens"])
        line["curve"] = curve.points
    found = stepper.subject.validation(stepper.model, config.eval.final_tokens)
    line.update(
        loss=found.loss,
        standard_error=found.standard_error,
        parameters=sum(p.numel() for p in stepper.model.parameters()),
    )
    if isinstance(stepper.subject, GlyphSubject):
        line["accuracy"] = stepper.subject.accuracy(stepper.model, config.eval.final_tokens)
    return line


def share_out(workers: int) -> None:
    """Run this command in several processes. Each one claims the next free run."""
    with tempfile.TemporaryDirectory() as claims:
        command = [sys.executable, *sys.argv, "--claims", claims]
        processes = [subprocess.Popen(command) for _ in range(workers)]
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.terminate()
    if any(codes):
        raise SystemExit("a worker failed; the run it had claimed is not done")


def claimed(claims: Path | None, name: str) -> bool:
    """Claim a run for this process. Returns False if another process has it."""
    if claims is None:
        return True
    try:
        (claims / name.replace("/", ",")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def read_matrix(path: Path, corpus_path: str | None) -> dict[str, Any]:
    matrix = tomllib.loads(path.read_text())
    matrix["corpus"] = matrix["base"].get("data", {}).get("path", "")
    if corpus_path:
        put(matrix["base"], "data.path", corpus_path)
    return matrix


class Bench:
    """Does runs one after the other, and reuses data on the device and compiled steps."""

    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._held: tuple[Any, Subject] | None = None
        self._stepper_for: dict[Any, Stepper] = {}

    def stepper(self, arm: Arm) -> Stepper:
        key = subject_key(arm.subject, arm.config)
        if self._held is None or self._held[0] != key:
            # One subject at a time: its data may fill much of the device's memory.
            self._stepper_for.clear()
            self._held = key, build_subject(arm.subject, arm.config, self.device)
        if arm.shape not in self._stepper_for:
            if self.device.type == "cpu":
                self._stepper_for.clear()
            self._stepper_for[arm.shape] = Stepper(arm.config, self._held[1], self.device, arm.batch)
        return self._stepper_for[arm.shape]

    def do(self, arm: Arm, matrix: dict[str, Any]) -> dict[str, Any]:
        stepper = self.stepper(arm)
        began = time.monotonic()
        line = train(arm, stepper)
        line.update(
            seconds=time.monotonic() - began,
            device=torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            config=as_recorded(arm.config, matrix),
            conditions=dataclasses.asdict(arm.conditions),
        )
        return line


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("matrices", type=Path, nargs="+", metavar="MATRIX.toml")
    parser.add_argument("--only", default="*")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "quality", help="folder (default: results/quality)")
    parser.add_argument("--corpus-path", help="folder to read instead of the matrix's data.path")
    parser.add_argument("--workers", type=int, default=1, help="number of processes, which share the matrices and the GPU")
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.workers > 1 and options.claims is None:
        share_out(options.workers)
        return
    started, last_s = time.monotonic(), 0.0
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    bench = Bench()
    for path in options.matrices:
        matrix, out = read_matrix(path, options.corpus_path), options.out / f"{path.stem}.jsonl"
        done = {json.loads(line)["name"] for line in out.read_text().splitlines()} if out.exists() else set()
        for arm in arms(matrix):
            if arm.name in done or not fnmatch.fnmatch(arm.name, options.only):
                continue
            if (time.monotonic() - started + last_s) / 60 > options.minutes:
                print("out of time; run the same command again for the rest", flush=True)
                return
            if not claimed(options.claims, f"{path.stem}/{arm.name}"):
                continue
            line = bench.do(arm, matrix)
            last_s = line["seconds"]
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{arm.name:60s} loss {line['loss']:.4f} ±{line['standard_error']:.4f}  {last_s:.1f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (SkerryError, OSError, tomllib.TOMLDecodeError) as error:
        raise SystemExit(f"run: {error}") from None
