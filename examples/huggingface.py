"""Train a small Hugging Face language model from scratch on two islands, offline: python examples/huggingface.py"""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import skerry

SHAPE = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4)


def island(index: int, address: str) -> None:
    torch.set_num_threads(1)
    text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8).long()
    model = LlamaForCausalLM(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    learner = skerry.join(address, model, optimizer, name=f"island-{index}")  # this line makes the loop an island
    for step in range(100):
        starts = torch.randint(len(text) - 64, (8,))
        batch = torch.stack([text[start : start + 64] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == 99:
            print(f"island {index} step {step:3d} loss {loss.item():.3f}", flush=True)
    learner.leave()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run = skerry.create(Path(folder) / "run", LlamaForCausalLM(SHAPE), skerry.SyncConfig(start_with=2))
        with skerry.serve(run) as address:
            torch.multiprocessing.spawn(island, args=(address,), nprocs=2)
