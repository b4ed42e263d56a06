"""Islands whose one fragment takes many chunks, for tests of bulk transfers."""

from __future__ import annotations

import threading

import torch
from torch import nn

import skerry
from skerry.config import SyncConfig


def large_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(1024, 4096, bias=False)  # 16 MiB


EXACT = SyncConfig(
    fragments=1, every=2, overlap=1, quorum=1, outer_lr=1.0, outer_momentum=0.0, send="fp32", outlier=0.0, silence_s=30.0
)


class Training:
    """An island that trains in a thread of its own until it is told to stop."""

    def __init__(self, address: str, **options: float) -> None:
        self.model = large_model()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.learner = skerry.join(address, self.model, optimizer, name="a", timeout_s=60, **options)
        self._over = threading.Event()

        def work() -> None:
            for step in range(1 << 30):
                if self._over.wait(0.005) or self.learner.finished:
                    return
                inputs = torch.randn(2, 1024, generator=torch.Generator().manual_seed(step))
                optimizer.zero_grad()
                self.model(inputs).square().mean().backward()
                optimizer.step()

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)
        self.learner.leave(timeout_s=60)
