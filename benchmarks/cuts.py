"""Cut a link repeatedly in the middle of a fragment: every fragment arrives whole, and little is sent twice.

    python benchmarks/cuts.py [--quick] [--cuts 50]

One island and a syncer process, with a link of --mbit between them. Each cut happens while a fragment is in flight, alternately
up and down. With one island, an outer learning rate of 1 and no momentum, the global model must equal the island's at the end,
up to fp32 rounding. A fragment that was applied twice, partly or not at all would show as a difference.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

import skerry
from skerry.chaos.proxy import Condition, LinkProxy, LinkState
from skerry.core.records import Merged, Unhealthy
from skerry.core.schema import TapeRecord
from skerry.observe.ledger import audit_run
from skerry.syncer.storage.run_folder import read_model, read_tape


def small_steps(model: nn.Module, learner: skerry.Learner, optimizer: torch.optim.Optimizer, over: threading.Event) -> None:
    step = 0
    while not over.wait(0.002):
        step += 1
        inputs = torch.randn(2, 1024, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--mbit", type=float, default=400.0)
    options = parser.parse_args()
    cuts = 6 if options.quick else options.cuts
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1024, bias=False))  # 2 × 16 MiB
    sync = skerry.SyncConfig(
        fragments=2, every=2, overlap=1, outer_lr=1.0, outer_momentum=0.0, send="fp32", outlier=0.0, silence_s=30.0
    )
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = skerry.create(Path(scratch) / "run", model, sync)
        with skerry.serve(folder) as address:
            host, port = address.split(":")
            proxy = LinkProxy(["island"], (host, int(port)))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            learner = skerry.join(proxy.address("island"), model, optimizer, name="island")
            link, over = learner._connection, threading.Event()
            thread = threading.Thread(target=small_steps, args=(model, learner, optimizer, over))
            thread.start()
            slow = Condition(bytes_per_s=options.mbit * 1e6 / 8)
            proxy.set("island", LinkState(up=slow, down=slow))
            for cut in range(cuts):
                meter = (link.sent, link.received)[cut % 2]
                start, wanted = meter.total_bytes, chance.randint(1 << 20, 14 << 20)
                while meter.total_bytes - start < wanted:
                    time.sleep(0.001)
                proxy.set("island", LinkState(cut=True))
                proxy.set("island", LinkState(up=slow, down=slow))
                print(f"cut {cut + 1} of {cuts}: {('up', 'down')[cut % 2]}, after {wanted / 1e6:.1f} MB", flush=True)
            proxy.set("island", LinkState())
            over.set()
            thread.join()
            learner.leave()
            proxy.close()
        seen: list[TapeRecord] = []
        read_tape(folder, [Merged, Unhealthy], seen.append)
        merged = sum(isinstance(record, Merged) for record in seen)
        expected = {name: tensor.detach() for name, tensor in model.named_parameters()}
        difference = max(float((tensor - expected[name]).abs().max()) for name, tensor in read_model(folder).items())
        ledger = audit_run(folder)
    fragment_bytes = 16 << 20
    extra = link.sent.total_bytes / (merged * fragment_bytes) - 1
    print(f"{merged} merges; {100 * extra:.1f}% more sent than merged; the models differ by at most {difference:.2g}")
    whole = difference < 1e-5 and merged == len(seen) and ledger.adds_up
    bar = {"bar": "cuts in the middle of a fragment, all of them arrived whole", "value": cuts if whole else 0, "target": cuts}
    print(json.dumps({**bar, "ok": whole, "merges": merged, "sent_beyond_merged": round(extra, 3)}))


if __name__ == "__main__":
    main()
