"""The training job that all algorithms share: data, model, optimizers, learning-rate schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from skerry.config import Config, TrainConfig
from skerry.core.leases.ranges import Pool, Range
from skerry.cores import cores
from skerry.data.corpus import Corpus, load_corpus
from skerry.data.windows import Windows
from skerry.errors import ConfigError
from skerry.models.gpt import GPT, build_gpt


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"islands.device must be auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"islands.device is {name!r}, but torch sees no GPU here")
    return device


def island_threads(config: Config) -> int:
    return config.islands.threads or max(1, cores() // config.islands.count)


def lr_factor(progress: float, train: TrainConfig) -> float:
    """Learning rate relative to its peak: linear warm-up, then cosine decay. `progress` is the spent share of the budget."""
    if progress < train.warmup:
        return max(progress / train.warmup, 0.02)
    share = (progress - train.warmup) / (1 - train.warmup)
    return half_cosine(share, train.final_lr)


def half_cosine(share: float, final: float) -> float:
    """Cosine decay from 1 at share 0 to `final` at share 1, constant afterwards."""
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


@dataclass
class Job:
    """Everything one worker needs to take inner steps."""

    config: Config
    corpus: Corpus
    windows: dict[str, Windows]
    """Readable data by pool: the corpus, and the folders pinned to this worker's region."""
    model: GPT
    device: torch.device
    forward: nn.Module
    optimizers: list[Optimizer]

    @property
    def step_tokens(self) -> int:
        """Tokens of one inner step of one worker."""
        return self.config.train.batch * self.config.model.context

    def set_lr(self, factor: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor

    def batch(self, step: int, worker: int) -> tuple[Tensor, Tensor]:
        """The samples of `worker` at run step `step`: its part of the global batch in the seeded order."""
        workers = max(self.config.islands.count, worker + 1)
        start = (step * workers + worker) * self.config.train.batch
        return self.read([Range("", start, self.config.train.batch)])

    @property
    def pools(self) -> list[Pool]:
        return [Pool(name, windows.windows_count, windows.fingerprint()) for name, windows in self.windows.items()]

    def read(self, ranges: Sequence[Range]) -> tuple[Tensor, Tensor]:
        """Read these samples as inputs and targets on the device."""
        parts = [self.windows[found.pool].batch(found.start, found.count) for found in ranges]
        inputs, targets = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        return inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.train.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Accumulate the gradients of one inner step over micro-batches. Returns the mean loss, on the device."""
        parts = self.config.train.accumulate
        total = torch.zeros((), device=self.device)
        for some_inputs, some_targets in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            with self.autocast():
                loss: Tensor = self.forward(some_inputs, some_targets)
            torch.autograd.backward(loss / parts)
            total += loss.detach() / parts
        return total

    def clip(self) -> None:
        if self.config.train.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.clip)

    def apply(self) -> None:
        self.clip()
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


def build_job(config: Config, region: str = "") -> Job:
    device = pick_device(config.islands.device)
    torch.set_num_threads(island_threads(config))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    corpus = load_corpus(config.data, config.model.context)
    model = build_gpt(config.model, corpus.vocab, config.train.seed).to(device)
    forward: nn.Module = torch.compile(model) if config.train.compile else model  # type: ignore[assignment]
    windows = {"": Windows(corpus.train, config.model.context, config.train.seed)}
    for pinned_to, folder in config.data.pinned_folders():
        if pinned_to == region:
            own = dataclasses.replace(
                config.data, corpus="folder" if config.data.corpus == "stdlib" else config.data.corpus, path=folder
            )
            tokens = load_corpus(own, config.model.context).train
            windows[folder] = Windows(tokens, config.model.context, config.train.seed)
    return Job(config, corpus, windows, model, device, forward, build_optimizers(model, config.train))


def build_optimizers(model: nn.Module, train: TrainConfig) -> list[Optimizer]:
    """AdamW for all parameters, or Muon for the matrices in the blocks and AdamW for the rest."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim == 2 and id(p) not in embeddings]
    others = [p for p in parameters if p.ndim < 2 or id(p) in embeddings]
    betas = (0.9, train.beta2)
    optimizers: list[Optimizer]
    if train.optimizer == "muon":
        # Muon's updates are scaled to AdamW's size, so one learning rate serves both.
        optimizers = [
            torch.optim.Muon(matrices, lr=train.lr, weight_decay=train.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=train.lr, betas=betas, weight_decay=0.0),
        ]
    else:
        groups = [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        fused = all(p.is_cuda for p in parameters) or all(p.device.type == "cpu" for p in parameters)
        optimizers = [torch.optim.AdamW(groups, lr=train.lr, betas=betas, fused=fused)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def load_weights(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load named tensors, as written by `skerry export`, into a model. Every parameter must be present."""
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {n for n, _ in model.named_parameters()}
    missing = [name for name in missing if name not in tied]
    if missing or unexpected:
        raise ConfigError(f"the weights do not fit the model: missing {_few(missing)}, unexpected {_few(unexpected)}")


def load_weights_file(model: nn.Module, path: str) -> None:
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"init file {path} cannot be read: {error}") from None
    load_weights(model, weights)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"
