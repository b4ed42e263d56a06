"""Validate the global model in its own process, which only reads the run folder."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from skerry.config import Config, from_json
from skerry.cores import cores
from skerry.data.corpus import Corpus, load_corpus
from skerry.data.windows import validation_batches
from skerry.errors import ConfigError, StoreError
from skerry.metrics import MetricsWriter
from skerry.models.gpt import GPT, build_gpt, generate
from skerry.syncer.storage.run_folder import read_identity, read_model, read_span_s, read_standing
from skerry.train.job import load_weights, pick_device

log = logging.getLogger("skerry.validate")

KEPT_CHECKPOINTS = 2
PROMPT = "def "


@dataclass(frozen=True)
class Validation:
    loss: float
    standard_error: float
    tokens: int


def validate(model: nn.Module, corpus: Corpus, context: int, max_tokens: int, device: torch.device) -> Validation:
    """Mean cross-entropy over fixed held-out windows, and the standard error of that mean."""
    losses: list[float] = []
    model.eval()
    with torch.no_grad():
        for inputs, targets in validation_batches(corpus.held_out, context, max_tokens, batch=16):
            inputs, targets = inputs.to(device), targets.to(device)
            logits = model(inputs)
            each = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
            losses += each.view(targets.shape).mean(1).tolist()
    model.train()
    count = len(losses)
    mean = sum(losses) / count
    variance = sum((loss - mean) ** 2 for loss in losses) / max(count - 1, 1)
    return Validation(mean, math.sqrt(variance / count), count * context)


def write_sample(model: GPT, corpus: Corpus, config: Config) -> str:
    if not config.eval.sample_tokens:
        return ""
    tokens = generate(model, corpus.tokenizer.encode(PROMPT), config.eval.sample_tokens, 0.7, config.train.seed)
    return PROMPT + corpus.tokenizer.decode(tokens)


def finish(folder: Path, config: Config, model: GPT, corpus: Corpus, device: torch.device, **facts: float) -> Validation:
    """Finish a job: final validation, exported weights, a sample, and result.json."""
    result = validate(model, corpus, config.model.context, config.eval.final_tokens, device)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.named_parameters()}
    save_model(folder / "model.safetensors", weights)
    sample = write_sample(model, corpus, config)
    found = {"validation_loss": result.loss, "standard_error": result.standard_error, **facts}
    (folder / "result.json").write_text(json.dumps({"algorithm": config.algorithm, **found}, indent=1) + "\n")
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        metrics.write("validation", loss=result.loss, tokens=facts.get("tokens"), step=facts.get("step"))
        metrics.write("result", sample=sample, **found)
    return result


def save_model(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write the file atomically. Raises StoreError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # free the space if the disk is full
        raise StoreError(f"{path} cannot be written: {error}") from None


class GlobalModel:
    """The run's current global model, loaded from its folder."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.folder = folder
        self.config: Config = from_json(Config, read_identity(folder).job_json)
        self.device = pick_device(device)
        self.corpus = load_corpus(self.config.data, self.config.model.context)
        self.model = build_gpt(self.config.model, self.corpus.vocab, self.config.train.seed).to(self.device)

    def refresh(self) -> dict[str, Tensor]:
        tensors = read_model(self.folder)
        load_weights(self.model, tensors)
        return tensors


def watch_run(folder: Path, poll_s: float = 0.5) -> None:
    """Validate the global model every `eval.every_tokens` until the run has ended, then finish the job."""
    os.nice(10)
    torch.set_num_threads(1)
    current = GlobalModel(folder)
    every = current.config.eval.every_tokens
    metrics = MetricsWriter(folder / "metrics.jsonl")
    standing = read_standing(folder)
    next_at = (standing.tokens // every + 1) * every
    while standing.phase != "ended":
        if standing.tokens >= next_at:
            next_at = (standing.tokens // every + 1) * every
            tensors = current.refresh()
            found = validate(
                current.model, current.corpus, current.config.model.context, current.config.eval.tokens, current.device
            )
            metrics.write("validation", loss=found.loss, tokens=standing.tokens, step=standing.step)
            _checkpoint(folder / "checkpoints", standing.step, tensors)
        time.sleep(poll_s)
        standing = read_standing(folder)
    metrics.close()
    current.refresh()
    torch.set_num_threads(max(1, cores() // 2))
    facts = {"tokens": standing.tokens, "step": standing.step, "seconds": read_span_s(folder)}
    device = _free_device(current.config)
    try:
        finish(folder, current.config, current.model.to(device), current.corpus, device, **facts)
    except RuntimeError as error:  # the GPU may be full, or there may be fewer GPUs than where the islands trained
        if device == current.device:
            raise
        log.warning("validating on the CPU instead: %s", error)
        current = GlobalModel(folder)  # after some CUDA errors the GPU copy is unreadable
        current.refresh()
        finish(folder, current.config, current.model, current.corpus, current.device, **facts)


def _free_device(config: Config) -> torch.device:
    """The device the islands trained on, which is free now; the CPU if this machine has no such device."""
    try:
        return pick_device(config.islands.device)
    except ConfigError:
        return torch.device("cpu")


def _checkpoint(folder: Path, step: int, tensors: dict[str, Tensor]) -> None:
    try:
        folder.mkdir(exist_ok=True)
        save_model(folder / f"step-{step:08d}.safetensors", tensors)
    except (OSError, StoreError) as error:
        log.warning("no checkpoint of step %d: %s", step, error)
        return
    for old in sorted(folder.glob("step-*.safetensors"))[:-KEPT_CHECKPOINTS]:
        old.unlink()
