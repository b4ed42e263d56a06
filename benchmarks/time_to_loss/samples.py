"""Copies of a run's model with their times, validated after the run so that validation takes no time from it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from skerry.config import Config
from skerry.data.corpus import load_corpus
from skerry.models.gpt import build_gpt
from skerry.syncer.storage.database import ask
from skerry.syncer.storage.run_folder import read_model, read_standing
from skerry.train.job import load_weights
from skerry.train.validate import validate
from time_to_loss.curves import Arm


@dataclass(frozen=True)
class Sample:
    at_s: float
    path: Path
    tokens: int


class Sampler:
    """Copies the global model of a run folder every few seconds, in a thread."""

    def __init__(self, folder: Path, every_s: float) -> None:
        self._folder, self._every_s = folder, every_s
        self._taken: list[Sample] = []
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        (folder / "samples").mkdir()

    def __enter__(self) -> Sampler:
        self._take()  # the initial weights
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            while not self._stop.wait(self._every_s):
                if read_standing(self._folder).phase == "running":
                    self._take()
        except Exception as error:  # finished() raises it: a curve with a gap must not look complete
            self._error = error

    def _take(self) -> None:
        tokens = read_standing(self._folder).tokens
        tensors = read_model(self._folder)
        at = time.time()  # after reading: fragments may be newer than the first one read
        path = self._folder / "samples" / f"{at:.3f}.safetensors"
        save_file(tensors, path)
        self._taken.append(Sample(at, path, tokens))

    def finished(self) -> list[Sample]:
        """All samples, with the end of the run as the last one; times since training began."""
        if self._error is not None:
            raise self._error
        self._take()
        began_at, ended_at = read_span(self._folder)
        *before, last = self._taken
        taken = [*(s for s in before if s.at_s < ended_at), Sample(ended_at, last.path, last.tokens)]
        return [Sample(max(0.0, s.at_s - began_at), s.path, s.tokens) for s in taken]


def read_span(folder: Path) -> tuple[float, float]:
    """When training began and when the run ended, by the tape, in unix seconds."""
    query = "SELECT min(CASE kind WHEN 'began' THEN at END), max(CASE kind WHEN 'ended' THEN at END) FROM tape"
    began_at, ended_at = ask(folder, lambda database: database.execute(query).fetchone())
    return float(began_at), float(ended_at)


def measure(arm: Arm, samples: list[Sample], config: Config, at_once: int) -> None:
    """Validate the samples, `at_once` in parallel, into the arm's curve. Removes their files."""
    corpus = load_corpus(config.data, config.model.context)
    own = threading.local()

    def prepare() -> None:
        torch.set_num_threads(1)  # per thread
        own.model = build_gpt(config.model, corpus.vocab, config.train.seed)

    def loss_of(sample: Sample) -> float:
        load_weights(own.model, load_file(sample.path))
        sample.path.unlink()
        return validate(own.model, corpus, config.model.context, config.eval.tokens, torch.device("cpu")).loss

    samples = sorted(samples, key=lambda sample: sample.at_s)
    with ThreadPoolExecutor(at_once, initializer=prepare) as pool:
        losses = list(pool.map(loss_of, samples))
    arm.points = [(sample.at_s, loss) for sample, loss in zip(samples, losses, strict=True)]
    arm.tokens = [sample.tokens for sample in samples]
