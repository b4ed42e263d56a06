"""Replay a run from its tape alone: same samples, same adoptions, same merges, bit-identical weights.

The tape holds every merge with its contributions, and the journal of every process (learner/journal.py). Everything else can be
derived: the initial weights from the settings, gradients from samples and weights, contributions from steps and bases. Each
version is compared with the checksum of the recorded one.

Processes are replayed one after the other, each only as far as the next merge needs.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor

from skerry.core.leases.ranges import Range
from skerry.errors import ReplayError
from skerry.learner.replica import Replica
from skerry.learner.state.optimizer_state import OptimizerState
from skerry.models.gpt import build_gpt
from skerry.syncer.extensions import check_extensions
from skerry.syncer.storage.create import gather
from skerry.syncer.storage.run_folder import read_checksums, read_fixed
from skerry.syncer.storage.version_file import state_checksum
from skerry.tensors.codecs.per_tensor import fragment_codec
from skerry.tensors.merge import FragmentState, merge, merge_rule, outer_optimizer, publish
from skerry.tensors.model import model_tensors
from skerry.train.island import COLD_STEPS
from skerry.train.job import Job, build_job, build_optimizers, load_weights_file, lr_factor
from skerry.train.recording import OuterStep, RecordedSession, Recording

SYNCER_THREADS = 1


class ReplayedSession:
    """One process of an island, taking its steps again."""

    def __init__(self, replay: Replay, process: RecordedSession) -> None:
        self._replay, self._process = replay, process
        self._config = replay.recording.config
        self._threads = _threads(process)
        model = build_gpt(self._config.model, replay.job.corpus.vocab, self._config.train.seed)
        self._job = dataclasses.replace(
            replay.job, model=model, forward=model, optimizers=build_optimizers(model, self._config.train)
        )
        identity = replay.recording.identity
        self._replica = Replica(model, identity.layout, identity.sync)
        self._replica.load_fixed(replay.fixed)
        self._state = OptimizerState(self._job.optimizers, self._replica)
        self.steps = 0
        self._held = [-1] * len(identity.layout.fragments)
        self._since = [0] * len(identity.layout.fragments)
        self._given: list[list[int]] = [[] for _ in identity.layout.fragments]
        self._tokens = 0
        self._last: list[Range] = []
        self._contributions: dict[tuple[int, int], Tensor] = {}
        """(fragment, step) → contribution taken after that step."""
        self._handed_on: dict[int, list[memoryview]] = {}
        self._to_give: list[tuple[int, int]] = []
        self._to_adopt: list[tuple[int, int, bool]] = []
        """(fragment, version, whole) of adoptions that remain before the next step."""
        self._take_over()
        self._end_step()

    def _take_over(self) -> None:
        process = self._process
        if process.source not in ("own", "peer"):
            return
        if not process.origin:
            raise ReplayError(f"{process.learner} took over optimizer state of unknown origin")
        parts = []
        for number, (session, steps) in enumerate(process.origin):
            island = self._replay.island(session)
            parts.append(island.state_after(steps, None if process.source == "own" else number))
        self._state.restore(parts)

    def state_after(self, steps: int, part: int | None) -> memoryview:
        """The optimizer state after this many steps, or one part of it."""
        self.advance(steps)
        if steps not in self._handed_on:
            raise ReplayError(f"the optimizer state of {self._process.learner} after step {steps} is no longer available")
        whole, *parts = self._handed_on[steps]
        return whole if part is None else parts[part]

    def advance(self, steps: int) -> None:
        while self.steps < steps:
            self._settle()
            self._step(self.steps + 1)
            self._end_step()

    def contribution(self, fragment: int, steps: int) -> Tensor:
        """The contribution to a fragment, taken after this many steps."""
        self.advance(steps)
        # Between the same two steps the fragment may have been adopted before the contribution was taken. So adopt one version
        # at a time: the next one to adopt may already contain this contribution.
        while (fragment, steps) not in self._contributions and self._settle_one(fragment):
            pass
        if (fragment, steps) not in self._contributions:
            raise ReplayError(
                f"{self._process.learner} contributed fragment {fragment} after step {steps} from a version it did not hold"
            )
        return self._contributions.pop((fragment, steps))

    def _step(self, step: int) -> None:
        process, config = self._process, self._config
        if step > process.covered:
            raise ReplayError(f"the journal of {process.learner} has a gap at step {step}")
        torch.set_num_threads(self._threads)
        self._tokens = process.tokens.get(step, self._tokens)
        progress = min(1.0, self._tokens / config.train.tokens)
        warm_up = min(1.0, step / COLD_STEPS) if process.source == "cold" else 1.0
        self._job.set_lr(lr_factor(progress, config.train) * warm_up)
        if step in process.data:
            self._last = process.data[step]
        else:
            self._last = [Range(self._last[-1].pool, self._last[-1].stop, sum(found.count for found in self._last))]
        self._job.backward(*self._job.read(self._last))
        self._job.apply()
        self.steps = step

    def _end_step(self) -> None:
        """Take the contributions whose base is held now. Adoptions are deferred until needed: their version may not be merged
        yet."""
        process = self._process
        if self.steps in process.handed_on and (self.steps or process.source in ("own", "peer")):
            parts = [self._state.pack(part)[0] for part in range(self._state.parts)]
            self._handed_on[self.steps] = [self._state.pack_all(), *parts]
        self._to_give = [give for give in process.gives.get(self.steps, ()) if not self._give(*give)]
        self._to_adopt = list(process.adopted.get(self.steps, ()))

    def _settle(self) -> None:
        while self._settle_one():
            pass

    def _settle_one(self, only: int | None = None) -> bool:
        """Make the next recorded adoption, of fragment `only` or of any. Returns False if none is left."""
        entry = next((entry for entry in self._to_adopt if only in (None, entry[0])), None)
        if entry is None:
            return False
        self._adopt(*entry)
        self._to_adopt.remove(entry)
        self._to_give = [give for give in self._to_give if not self._give(*give)]
        return True

    def _give(self, fragment: int, base: int) -> bool:
        if self._held[fragment] != base:
            return False
        data = self._replica.encode(self._replica.snapshot(fragment, self.steps))
        self._contributions[fragment, self.steps] = self._replay.sent[fragment].decode(data, self._replay.numel(fragment))
        self._given[fragment].append(self.steps)
        return True

    def _adopt(self, fragment: int, version: int, whole: bool) -> None:
        replay = self._replay
        if whole:
            self._replica.start_whole(fragment)
            self._given[fragment] = []
        counted = replay.counted(fragment, version, self._process.session)
        since = counted if counted in self._given[fragment] else self._since[fragment]
        values = replay.published(fragment, version)
        self._replica.adopt(fragment, self._replica.prepare(fragment, values, since), since, counted)
        carries = replay.recording.identity.sync.adopt == "carry"
        self._since[fragment] = since if carries and not whole else self.steps
        self._given[fragment] = [steps for steps in self._given[fragment] if steps > self._since[fragment]]
        self._held[fragment] = version


class Replay:
    def __init__(self, folder: Path) -> None:
        self.recording = Recording(folder)
        identity = self.recording.identity
        check_extensions(identity.sync, str(folder))
        self._layout = identity.layout
        self._rule, self._outer = merge_rule(identity.sync), outer_optimizer(identity.sync)
        self.sent = [fragment_codec(identity.sync.send, self._layout, fragment) for fragment in self._layout.fragments]
        self._publish_codecs = [
            fragment_codec(identity.sync.publish, self._layout, fragment) for fragment in self._layout.fragments
        ]
        self.fixed: dict[str, Tensor] = load(read_fixed(folder, identity))
        self.job = self._build_job()
        self.states = self._initial()
        self._versions: dict[tuple[int, int], Tensor] = {}
        self._uses = self._count_uses()
        for index in range(len(self.states)):
            self._publish(index, 0)
        self._counted: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        self._islands: dict[str, ReplayedSession] = {}
        self.done = 0
        """Number of outer steps replayed."""

    def _build_job(self) -> Job:
        """The job, on the CPU and with the data of all regions."""
        config = self.recording.config
        config = dataclasses.replace(config, islands=dataclasses.replace(config.islands, device="cpu"))
        jobs = [build_job(config, region) for region in {"", *(region for region, _ in config.data.pinned_folders())}]
        windows = {name: found for job in jobs for name, found in job.windows.items()}
        return dataclasses.replace(jobs[0], windows=windows)

    def _initial(self) -> list[FragmentState]:
        config = self.recording.config
        model = build_gpt(config.model, self.job.corpus.vocab, config.train.seed)
        if config.init:
            load_weights_file(model, config.init)
        named = {spec.name: tensor for spec, tensor in model_tensors(model)}
        fragments = self._layout.fragments
        states = [FragmentState.fresh(gather(self._layout, fragment, named), self._outer) for fragment in fragments]
        checksums = read_checksums(self.recording.folder)
        for index, state in enumerate(states):
            if state_checksum(state) != checksums[index, 0]:
                raise ReplayError(
                    "the initial weights differ from the recorded ones: another version of torch, or another init file"
                )
        return states

    def _count_uses(self) -> dict[tuple[int, int], int]:
        """How often each version will be adopted; it is kept until the last time."""
        uses: dict[tuple[int, int], int] = defaultdict(int)
        for process in self.recording.sessions.values():
            for steps, entries in process.adopted.items():
                for fragment, version, _ in entries if steps <= process.needed else ():
                    uses[fragment, version] += 1
        return uses

    def _publish(self, fragment: int, version: int) -> None:
        if self._uses[fragment, version]:
            self._versions[fragment, version] = self.states[fragment].public

    def published(self, fragment: int, version: int) -> Tensor:
        if (fragment, version) not in self._versions:
            raise ReplayError(f"version {version} of fragment {fragment} was adopted before it was merged")
        values = self._versions[fragment, version]
        self._uses[fragment, version] -= 1
        if not self._uses[fragment, version]:
            del self._versions[fragment, version]
        return values

    def numel(self, fragment: int) -> int:
        return self._layout.fragments[fragment].numel

    def counted(self, fragment: int, version: int, session: str) -> int:
        """How many steps of this session are part of this version."""
        found = [at_step for merged_in, at_step in self._counted[fragment, session] if merged_in <= version]
        return found[-1] if found else 0

    def island(self, session: str) -> ReplayedSession:
        if session not in self._islands:
            if session not in self.recording.sessions:
                raise ReplayError(f"the tape has no session {session[:8]}")
            self._islands[session] = ReplayedSession(self, self.recording.sessions[session])
        return self._islands[session]

    def run(self, outer_steps: int | None = None) -> Iterator[OuterStep]:
        """Replay up to this many outer steps. Raises ReplayError at the first one whose result differs."""
        for merged in self.recording.merges[self.done : outer_steps]:
            self._merge(merged)
            self.done += 1
            yield merged

    def _merge(self, outer: OuterStep) -> None:
        merged, fragment = outer.merge, outer.merge.fragment
        deltas = [self.island(share.session).contribution(fragment, share.at_step) for share in merged.shares]
        torch.set_num_threads(SYNCER_THREADS)
        before = self.states[fragment]
        after = merge(
            self._layout,
            self._layout.fragments[fragment],
            before,
            deltas,
            [share.weight for share in merged.shares],
            lr=merged.outer_lr,
            momentum=merged.outer_momentum,
            rule=self._rule,
            outer=self._outer,
            presence=merged.presence,
            fresh=[share.base == merged.version - 1 for share in merged.shares],
        )
        self.states[fragment], _ = publish(before, after, self._publish_codecs[fragment])
        if state_checksum(self.states[fragment]) != outer.checksum:
            names = ", ".join(share.learner for share in merged.shares)
            what = f"outer step {self.done + 1}, {outer}, with contributions of {names}"
            raise ReplayError(f"{what}, does not match the recording")
        for share in merged.shares:
            self._counted[fragment, share.session].append((merged.version, share.at_step))
        self._publish(fragment, merged.version)

    def model(self) -> dict[str, Tensor]:
        """The global model after the outer steps replayed so far."""
        flat = {s.name: torch.empty(s.numel, dtype=torch.float32) for s in self._layout.tensors if s.rule != "fixed"}
        for fragment, state in zip(self._layout.fragments, self.states, strict=True):
            sizes = [piece.numel for piece in fragment.pieces]
            for piece, part in zip(fragment.pieces, torch.split(state.values, sizes), strict=True):
                flat[self._layout.tensors[piece.tensor].name][piece.start : piece.stop] = part
        return {spec.name: flat[spec.name].reshape(spec.shape) for spec in self._layout.tensors if spec.rule != "fixed"}


def _threads(process: RecordedSession) -> int:
    """Number of threads of the process, from its platform string. The summation order depends on it."""
    found = re.search(r", (\w+)(?::\d+)?, (\d+) threads", process.platform)
    if found is None or found[1] != "cpu":
        raise ReplayError(
            f"{process.learner} trained on {process.platform or 'an unknown device'}; only training on a CPU can be replayed"
        )
    return int(found[2])
