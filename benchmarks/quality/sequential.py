"""Simulate many learners in one process, one after the other, around the real core: same decisions, merges and codecs as a run.

Virtual time replaces processes and sockets: a learner's step takes its step time, a transfer takes its delay. The decisions of
the syncer and of the learners are those of skerry.core, unchanged. One set of parameters lives on the device and learners'
states are swapped through it, so a GPU compiles and captures the training step once.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from subjects import Draw, Subject
from torch import Tensor, nn

from skerry.config import Config
from skerry.core import messages as m
from skerry.core.exchange import KEPT_GIVES, Exchange, Give, Question, Version
from skerry.core.syncer import SyncerCore
from skerry.errors import ConfigError
from skerry.tensors.codecs.feedback import Feedback
from skerry.tensors.codecs.per_tensor import fragment_codec
from skerry.tensors.fragments import Layout, split
from skerry.tensors.merge import FragmentState, merge, merge_rule, publish
from skerry.tensors.model import model_tensors
from skerry.train.island import COLD_STEPS
from skerry.train.job import build_optimizers, half_cosine, lr_factor


@dataclass(frozen=True)
class Conditions:
    """External conditions of a run, in units of one inner step of the fastest learner, and experimental rules."""

    step_times: tuple[float, ...] = ()
    """Relative step time of each learner; 1.0 for learners beyond the end."""
    jitter: float = 0.02
    """Random variation of step times, as a share. With equal step times the same learner would always come first, and all
    others would be asked just before the end of a step."""
    exchange_steps: float | None = None
    """Time from snapshot to fetched version; by default a little less than the overlap τ."""
    lost_share: float = 0.0
    """Share of learner time lost to failures at random times, each `outage_steps` long."""
    outage_steps: float = 60.0
    restore: str = "own"
    """Optimizer state of a returning learner: own, peer (from the learner that is furthest), or none, followed by a warm-up as
    in a real island."""
    final_outer_lr: float = 1.0
    """Experiment, not in the library: relative size of the outer step at the end of the budget."""
    adopt: str = ""
    """Experiment: "eager" carries, and applies a prediction of the merge without waiting for it. At its snapshot a fragment
    repeats the previous outer step, with this learner's own share replaced by its new progress (eager updates, arXiv
    2502.12996)."""
    begin_adopt: str = ""
    """Experiment: adoption rule during the initial phase, if different."""
    outer: str = ""
    """Experiment: outer steps that depend on the age or number of contributions. "decay" halves a contribution for every
    version it is behind (the decay of CGAD, arXiv 2605.09126, at ages far below its cut-off). "aligned" removes from stale
    contributions the component that points against the momentum, tensor by tensor (as HeLoCo, arXiv 2606.00271, corrects
    directions). "delayed" applies the momentum only after every M contributions, for M islands (delayed Nesterov, arXiv
    2401.09135). "longer" raises the momentum to the power of the share of islands in the merge, so that it decays per
    contribution instead of per merge. In the long run its steps are as long as with all islands, so compare it with
    `damp_absent = false` too."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("restore", ("own", "peer", "none")),
            ("adopt", ("", "eager")),
            ("begin_adopt", ("", "overwrite", "carry", "eager")),
            ("outer", ("", "decay", "aligned", "delayed", "longer")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"conditions.{name} must be one of {allowed}, got {getattr(self, name)!r}")


class Stepper:
    """The training step on the device. Learners' parameters and optimizer states are swapped through it."""

    def __init__(self, config: Config, subject: Subject, device: torch.device, batch: int) -> None:
        self.config, self.subject, self.device = config, subject, device
        self.model = subject.build(config, config.train.seed).to(device)
        self.tensors = [tensor.detach() for _, tensor in model_tensors(self.model)]
        self.optimizers = build_optimizers(self.model, config.train)
        self._graph: Any = None
        self._forward: Any = torch.compile(self.model, dynamic=False) if config.train.compile else self.model
        sample = subject.sample
        self._x = torch.zeros((batch, *sample.x_shape), dtype=sample.x_dtype, device=device)
        self._y = torch.zeros((batch, *sample.y_shape), dtype=sample.y_dtype, device=device)
        self._loss = torch.zeros((), device=device)
        self._initial = [tensor.clone() for tensor in self.tensors]
        self._outside: list[torch.optim.Optimizer] = []
        """Optimizers whose step cannot be captured, because it reads the learning rate on the host (Muon)."""
        if device.type == "cuda":
            self._outside = [o for o in self.optimizers if any("capturable" not in group for group in o.param_groups)]
            for optimizer in self.optimizers:
                for group in optimizer.param_groups if optimizer not in self._outside else []:
                    group["lr"] = torch.tensor(0.0, device=device)
                    group["capturable"] = True
        self._warm_up()

    def _once(self) -> None:
        cuda = self.device.type == "cuda"
        dtype = torch.bfloat16 if self.config.train.precision == "bf16" else torch.float32
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype == torch.bfloat16, cache_enabled=not cuda):
            loss = self._forward(self._x, self._y)
        loss.backward()
        if self.config.train.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.clip)
        for optimizer in self.optimizers:
            if optimizer not in self._outside:
                optimizer.step()
        self._loss.copy_(loss.detach())

    def _step_outside(self) -> None:
        for optimizer in self._outside:
            optimizer.step()

    def _clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _warm_up(self) -> None:
        """Create the optimizer state and capture the step, then reset the weights."""
        if self.device.type == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._clear()
                    self._once()
                    self._step_outside()
            torch.cuda.current_stream().wait_stream(side)
            self._clear()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._once()
        else:
            self._once()
            self._clear()
        self.state_tensors = [
            value
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            for _, value in sorted(optimizer.state[parameter].items())
            if isinstance(value, Tensor)
        ]
        for tensor in self.state_tensors:
            tensor.zero_()
        self.reset(self.config)

    def reset(self, config: Config) -> None:
        """Reset to the initial weights of this seed, for another run of the same shape."""
        fresh = self.subject.build(config, config.train.seed)
        self._initial = [tensor.detach().to(self.device) for _, tensor in model_tensors(fresh)]
        torch._foreach_copy_(self.tensors, self._initial)
        torch._foreach_zero_(self.state_tensors)

    def set_lr(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr

    def step(self, x: Tensor, y: Tensor) -> None:
        self._x.copy_(x, non_blocking=True)
        self._y.copy_(y, non_blocking=True)
        if self._graph is not None:
            self._graph.replay()
            self._step_outside()
        else:
            self._clear()
            self._once()

    @property
    def loss(self) -> float:
        return float(self._loss)


@dataclass
class SequentialLearner:
    name: str
    slot: int
    step_time: float
    weights: list[Tensor]
    optimizer_state: list[Tensor]
    exchange: Exchange
    base: list[Tensor]
    alive: bool = True
    life: int = 0
    cold_steps: int | None = None
    """Steps since the learner returned without optimizer state; None if it has one."""
    waits: bool = False
    """In lock-step: the learner waits for a merge."""
    staged: dict[int, Tensor] = field(default_factory=dict)
    """In lock-step: snapshots of fragments, taken when they were due."""
    ready: dict[int, Tensor] = field(default_factory=dict)
    snapshots: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    feedback: dict[int, Feedback | None] = field(default_factory=dict)
    outer_steps: dict[int, Tensor] = field(default_factory=dict)
    """By fragment: previous version minus latest version."""
    last_progress: dict[int, Tensor] = field(default_factory=dict)


class SequentialRun:
    def __init__(self, config: Config, stepper: Stepper, samples: Draw, conditions: Conditions) -> None:
        self.config = config.resolved()
        self.sync = self.config.sync
        self.stepper, self.samples, self.conditions = stepper, samples, conditions
        self.layout: Layout = split([spec for spec, _ in model_tensors(stepper.model)], self.sync.fragments)
        self.core = SyncerCore(self.sync, len(self.layout.fragments))
        stepper.reset(self.config)
        self.states = [FragmentState.fresh(self._read(stepper.tensors, i)) for i in range(len(self.layout.fragments))]
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._wake: float | None = None
        self._deltas: dict[tuple[int, str], Tensor] = {}
        delay = conditions.exchange_steps if conditions.exchange_steps is not None else max(self.sync.overlap - 0.2, 0.2)
        self._delay = delay / 2
        self._random, self._pace = random.Random(self.config.train.seed), random.Random(self.config.train.seed)
        self.sent_bytes = 0
        self._sent_in: Counter[int] = Counter()
        """Bytes sent per interval of H steps."""
        self.published_bytes = 0
        fragments = self.layout.fragments
        self._send = [fragment_codec(self.sync.send, self.layout, fragment) for fragment in fragments]
        self._publish = [fragment_codec(self.sync.publish, self.layout, fragment) for fragment in fragments]
        needed = any(codec.needs_feedback for codec in self._send)
        self._with_feedback = self.sync.feedback == "always" or (self.sync.feedback == "auto" and needed)
        self.lost_steps = 0
        self.members: list[int] = []
        self.ages: Counter[int] = Counter()
        """Number of contributions by age in versions."""
        self._delayed: dict[int, tuple[int, Tensor]] = {}
        """By fragment: number and summed progress of contributions that the momentum does not include yet."""
        times = list(conditions.step_times) + [1.0] * self.config.islands.count
        self.learners = [
            SequentialLearner(
                f"island-{i}",
                i,
                times[i],
                [t.clone() for t in stepper.tensors],
                [t.clone() for t in stepper.state_tensors],
                Exchange(self.sync, len(self.layout.fragments)),
                [s.values for s in self.states],
            )
            for i in range(self.config.islands.count)
        ]
        self._by_name = {learner.name: learner for learner in self.learners}

    @property
    def _rules(self) -> set[str]:
        """All adoption rules that may apply at some time of the run."""
        return {self.sync.adopt, self.conditions.adopt, self.conditions.begin_adopt}

    @property
    def _adopt(self) -> str:
        """The current adoption rule."""
        later = self.conditions.adopt or self.sync.adopt
        return self.conditions.begin_adopt or later if self.core.step < self.sync.begin.steps else later

    @property
    def peak_bytes_per_step(self) -> float:
        """Bytes one island sends per step, in the busiest interval of H steps."""
        return max(self._sent_in.values(), default=0) / self.sync.every / len(self.learners)

    # ------------------------------------------------------------ tensors

    def _read(self, tensors: list[Tensor], index: int) -> Tensor:
        pieces = self.layout.fragments[index].pieces
        return torch.cat([tensors[p.tensor].reshape(-1)[p.start : p.stop].float() for p in pieces])

    def _write(self, tensors: list[Tensor], index: int, change: Tensor, adopt: str = "overwrite") -> None:
        pieces = self.layout.fragments[index].pieces
        for piece, part in zip(pieces, change.split([p.numel for p in pieces]), strict=True):
            target = tensors[piece.tensor].view(-1)[piece.start : piece.stop]
            if adopt == "carry":
                target.add_(part)
            elif adopt == "blend":
                target.lerp_(part, self.sync.blend)
            else:
                target.copy_(part)

    # ------------------------------------------------------------ events

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def _dispatch(self, event: m.Event) -> None:
        for learner in self.learners:
            if learner.waits or (learner.alive and learner.exchange.phase == "joining"):
                self.core.bytes_moved(learner.name, self.now)  # waiting learners are not silent
        for action in self.core.handle(event, self.now).actions:
            if isinstance(action, m.Begin):
                learner = self._by_name[action.learner]
                self._settle(learner)  # adopt versions that were announced while it waited
                learner.exchange.begin(action.step)
                self._start_step(learner)
            elif isinstance(action, m.Ask):
                learner = self._by_name[action.learner]
                learner.exchange.asked(Question(action.fragment, action.round, action.min_base), action.anew)
                self._answer(learner)
            elif isinstance(action, m.Merge):
                self._merge(action)
            elif isinstance(action, m.Announce):
                for name, counted in zip(action.learners, action.counted, strict=True):
                    self._announce(self._by_name[name], action, counted)
            elif isinstance(action, m.StopTraining):
                learner = self._by_name[action.learner]
                learner.exchange.stop()
                self._settle(learner)
            elif isinstance(action, m.WakeAt):
                if self._wake is None or action.at < self._wake:
                    self._wake = action.at
                    self._at(action.at, self._tick)

    def _tick(self) -> None:
        """Dispatch a Tick, unless an earlier wake-up has replaced this one."""
        if self._wake is not None and self.now >= self._wake:
            self._wake = None
            self._dispatch(m.Tick())

    def _stepper_of(self, learner: SequentialLearner) -> Callable[[], None]:
        life = learner.life
        return lambda: self._step(learner) if learner.alive and learner.life == life else None

    def _step(self, learner: SequentialLearner) -> None:
        exchange, stepper = learner.exchange, self.stepper
        if exchange.phase != "training":
            return
        train = self.config.train
        warm_up = 1.0
        if learner.cold_steps is not None:
            learner.cold_steps += 1
            warm_up = min(1.0, learner.cold_steps / COLD_STEPS)
        stepper.set_lr(train.lr * lr_factor(self.core.tokens / train.tokens, train) * warm_up)
        torch._foreach_copy_(stepper.tensors, learner.weights)
        torch._foreach_copy_(stepper.state_tensors, learner.optimizer_state)
        count = max(self.config.islands.count, learner.slot + 1)
        x, y = self.samples((exchange.step * count + learner.slot) * train.batch, train.batch)
        stepper.step(x, y)
        torch._foreach_copy_(learner.weights, stepper.tensors)
        torch._foreach_copy_(learner.optimizer_state, stepper.state_tensors)
        for fragment in exchange.stepped(train.batch * stepper.subject.sample.tokens):
            learner.staged[fragment] = self._read(learner.weights, fragment)
        self._settle(learner)
        self._dispatch(m.Reported(learner.name, exchange.step, exchange.totals.tokens, learner.step_time))
        self._maybe_fail(learner)
        if learner.alive:
            self._go_on(learner)

    def _go_on(self, learner: SequentialLearner) -> None:
        """Start the next step. In lock-step, wait for overdue merges first."""
        learner.waits = learner.exchange.must_wait()
        if not learner.waits:
            self._start_step(learner)

    def _start_step(self, learner: SequentialLearner) -> None:
        jitter = self.conditions.jitter * self._pace.uniform(-1, 1)
        self._at(self.now + learner.step_time * (1 + jitter), self._stepper_of(learner))

    def _settle(self, learner: SequentialLearner) -> None:
        """At a step boundary: adopt fetched versions, then answer questions."""
        for version in learner.exchange.adoptable():
            values = learner.ready.pop(version.fragment)
            change, since = values, learner.exchange.uncounted_since(version).steps
            given = learner.snapshots.setdefault(version.fragment, {})
            rule, held = self._adopt, learner.base[version.fragment]
            if rule in ("carry", "eager"):
                rule, change = "carry", values - given.get(since, held)
                learner.snapshots[version.fragment] = {at: kept + change for at, kept in given.items() if at > since}
            else:
                given.clear()
            # The exchange's accounting depends on the rule, which may differ from the settings.
            learner.exchange.sync = dataclasses.replace(self.sync, adopt=rule)
            self._write(learner.weights, version.fragment, change, rule)
            if "eager" in self._rules:
                learner.outer_steps[version.fragment] = held - values
            learner.base[version.fragment] = values
            feedback = learner.feedback[version.fragment]
            if feedback is not None:
                feedback.merged(version.counted)
            learner.exchange.adopted(version)
        self._answer(learner)

    def _answer(self, learner: SequentialLearner) -> None:
        for answer in learner.exchange.answers():
            question = answer.question
            if not isinstance(answer, Give):
                nothing = m.NothingToGive(learner.name, question.fragment, question.round)
                self._at(self.now, lambda nothing=nothing: self._dispatch(nothing))
                continue
            values = learner.staged[question.fragment] if answer.staged else self._read(learner.weights, question.fragment)
            learner.exchange.given(answer)
            delta = self._sent(learner, question.fragment, answer.at.steps, values)
            if self._adopt == "eager":
                values = self._predict(learner, question.fragment, values)
            if self._rules & {"carry", "eager"}:  # now, or when the merge is adopted
                learner.snapshots.setdefault(question.fragment, {})[answer.at.steps] = values
            offer = m.Contributed(
                learner.name, question.fragment, question.round, answer.base, answer.steps, answer.tokens, answer.at.steps
            )
            self._at(self.now + self._delay, lambda offer=offer, delta=delta: self._arrive(offer, delta))

    def _predict(self, learner: SequentialLearner, fragment: int, values: Tensor) -> Tensor:
        """Replace a fragment that was just contributed by a prediction of its next version."""
        progress = learner.base[fragment] - values
        before, learner.last_progress[fragment] = learner.last_progress.get(fragment), progress
        if before is None or fragment not in learner.outer_steps:
            return values
        prediction = learner.base[fragment] - learner.outer_steps[fragment] - (progress - before) / len(self.learners)
        self._write(learner.weights, fragment, prediction)
        return prediction

    def _sent(self, learner: SequentialLearner, fragment: int, at_step: int, values: Tensor) -> Tensor:
        """Encode and decode a learner's progress, as the syncer receives it."""
        codec, feedback = self._send[fragment], learner.feedback[fragment]
        progress = learner.base[fragment] - values
        missing = feedback.missing if feedback is not None else None
        data = codec.encode(progress if missing is None else progress + missing)
        self.sent_bytes += data.numel()
        self._sent_in[int(self.now // self.sync.every)] += data.numel()
        sent = codec.decode(data, values.numel())
        if feedback is not None:
            feedback.sent(at_step, progress, sent)
        return sent

    def _arrive(self, offer: m.Contributed, delta: Tensor) -> None:
        if self.core.why_refused(offer) is None:
            self._deltas[offer.fragment, offer.learner] = delta
            self._dispatch(offer)

    def _merge(self, order: m.Merge) -> None:
        deltas = [self._deltas.pop((order.fragment, share.learner)) for share in order.shares]
        ages = [order.version - 1 - share.base for share in order.shares]
        self.ages.update(ages)
        before, rule = self.states[order.fragment], self.conditions.outer
        lr = order.outer_lr * half_cosine(self.core.tokens / self.sync.budget_tokens, self.conditions.final_outer_lr)
        momentum, presence = order.outer_momentum, order.presence
        weights = [share.weight for share in order.shares]
        if rule == "decay":
            # Via the weight, so that with radial merging its direction counts less as well as its length.
            decayed = [weight * 0.5**age for weight, age in zip(weights, ages, strict=True)]
            presence *= sum(decayed) / sum(weights)
            weights = decayed
        elif rule == "aligned":
            deltas = [self._aligned(order.fragment, delta) if age else delta for delta, age in zip(deltas, ages, strict=True)]
        elif rule == "longer":
            momentum **= presence
        after = merge(
            self.layout,
            self.layout.fragments[order.fragment],
            before,
            deltas,
            weights,
            rule=merge_rule(self.sync),
            lr=1.0 if rule == "delayed" else lr,
            momentum=0.0 if rule == "delayed" else momentum,
            presence=presence,
            fresh=order.fresh,
        )
        if rule == "delayed":
            after = self._delayed_step(order, before, before.values - after.values, lr)
        self.states[order.fragment], data = publish(before, after, self._publish[order.fragment])
        self.published_bytes += data.numel()
        self.members.append(len(order.shares))
        self._at(self.now, lambda: self._dispatch(m.Stored(order.fragment, order.version)))

    def _aligned(self, fragment: int, delta: Tensor) -> Tensor:
        """Remove the component that points against the momentum, tensor by tensor."""
        aligned = delta.float()
        sizes = [piece.numel for piece in self.layout.fragments[fragment].pieces]
        for part, heading in zip(aligned.split(sizes), self.states[fragment].momentum.split(sizes), strict=True):
            along = torch.dot(part, heading)
            if along < 0:
                part.sub_(heading * (along / torch.dot(heading, heading)))
        return aligned

    def _delayed_step(self, order: m.Merge, before: FragmentState, progress: Tensor, lr: float) -> FragmentState:
        """Apply the momentum after every M contributions, with all progress since the last time."""
        count, held = self._delayed.pop(order.fragment, (0, torch.zeros_like(progress)))
        count, held = count + len(order.shares), held + progress
        if count < len(self.learners):
            self._delayed[order.fragment] = count, held
            return FragmentState(before.values - lr * progress, before.state)
        momentum = order.outer_momentum * before.momentum + held
        return FragmentState(before.values - lr * (progress + order.outer_momentum * momentum), {"momentum": momentum})

    def _announce(self, learner: SequentialLearner, action: m.Announce, counted: int) -> None:
        version = Version(action.fragment, action.version, action.round, counted)
        values = self.states[action.fragment].public
        life = learner.life

        def arrive() -> None:
            if not learner.alive or learner.life != life:
                return
            learner.exchange.announced(version)
            for wanted in learner.exchange.to_fetch():
                if wanted == version and learner.exchange.fetched(version):
                    learner.ready[version.fragment] = values
            if learner.waits or learner.exchange.phase == "stopped":
                self._settle(learner)
            if learner.waits:
                self._go_on(learner)

        self._at(self.now + self._delay, arrive)

    def _maybe_fail(self, learner: SequentialLearner) -> None:
        share = self.conditions.lost_share
        if not share or learner.exchange.phase != "training":
            return
        up = self.conditions.outage_steps * (1 - share) / share
        if self._random.random() >= learner.step_time / up:
            return
        learner.alive = False
        learner.life += 1
        self.lost_steps += int(self.conditions.outage_steps)
        self._dispatch(m.StreamEnded(learner.name, f"{learner.name}-{learner.life - 1}"))
        self._at(self.now + self.conditions.outage_steps, lambda: self._return(learner))

    def _return(self, learner: SequentialLearner) -> None:
        if self.core.phase != "running":
            return
        learner.alive = True
        learner.exchange = Exchange(self.sync, len(self.layout.fragments))
        peers = [other for other in self.learners if other.alive and other is not learner]
        if self.conditions.restore == "peer" and peers:
            furthest = max(peers, key=lambda peer: peer.exchange.step)
            torch._foreach_copy_(learner.optimizer_state, furthest.optimizer_state)
            learner.cold_steps = furthest.cold_steps
        elif self.conditions.restore != "own":
            torch._foreach_zero_(learner.optimizer_state)
            learner.cold_steps = 0
        self._join(learner)

    def _join(self, learner: SequentialLearner) -> None:
        versions = tuple(fragment.version for fragment in self.core.fragments)
        self._dispatch(m.Hello(learner.name, f"{learner.name}-{learner.life}"))
        for stale in (learner.ready, learner.snapshots, learner.outer_steps, learner.last_progress):
            stale.clear()
        for index, version in enumerate(versions):
            values = self.states[index].public
            learner.base[index] = values
            learner.feedback[index] = Feedback(KEPT_GIVES) if self._with_feedback else None
            self._write(learner.weights, index, values)
            learner.exchange.adopted(Version(index, version, 0, 0))
        self._dispatch(m.Ready(learner.name))

    # ------------------------------------------------------------ running

    def run(self, on_progress: Callable[[SequentialRun], None] | None = None) -> None:
        for learner in self.learners:
            self._join(learner)
        while self._events and self.core.phase != "ended":
            self.now, _, act = heapq.heappop(self._events)
            act()
            if on_progress is not None:
                on_progress(self)
        if self.core.phase != "ended":
            raise RuntimeError(f"the run stopped in phase {self.core.phase} at {self.core.tokens} tokens")

    def load_global(self) -> None:
        for index, state in enumerate(self.states):
            self._write(self.stepper.tensors, index, state.values)


def run_data_parallel(config: Config, stepper: Stepper, samples: Draw, on_progress: Callable[[int], None] | None = None) -> int:
    """The baseline: one learner with the global batch. Returns its tokens; `on_progress` gets them after every step."""
    stepper.reset(config)
    train = config.train
    batch = train.batch * config.islands.count
    tokens = 0
    step = 0
    while tokens < train.tokens:
        stepper.set_lr(train.lr * lr_factor(tokens / train.tokens, train))
        stepper.step(*samples(step * batch, batch))
        step += 1
        tokens += batch * stepper.subject.sample.tokens
        if on_progress is not None:
            on_progress(tokens)
    return tokens
