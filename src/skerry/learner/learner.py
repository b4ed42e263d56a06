"""`skerry.join`: attach a model and its optimizer to a run. The user's loop keeps its shape.

Everything on the training thread happens in optimizer hooks: before a step the gate closes, after it the step is counted,
fetched fragments are adopted, and the gate opens. Outside lock-step nothing here waits for the network.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal
from urllib.parse import quote

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from skerry.clock import Clock, SystemClock
from skerry.core.exchange import Exchange
from skerry.core.leases.ranges import Pool
from skerry.core.messages import OVER
from skerry.errors import ConfigError, WireError
from skerry.learner.link import CONNECTIONS, Link
from skerry.learner.replica import Replica
from skerry.learner.sampler import LeasedRanges, LeasedSampler
from skerry.learner.state.courier import StateCourier
from skerry.learner.state.optimizer_state import OptimizerState
from skerry.wire.channel import TLS

log = logging.getLogger("skerry.learner")

OptimizerSource = Literal["fresh", "own", "peer", "cold"]
OWN_STATE_ROUNDS, OWN_STATE_SHARE = 10, 0.1
"""An optimizer's state that was kept is used if it is not older than so many times H steps, or this share of the run so far."""


class Learner:
    """An island's part in a run. Made by `join`."""

    def __init__(self, link: Link, optimizers: Sequence[Optimizer], tokens_per_step: int, clock: Clock) -> None:
        assert link.exchange is not None and link.replica is not None
        self._link = link
        self._exchange: Exchange = link.exchange
        self._replica: Replica = link.replica
        self._clock = clock
        self._tokens_per_step = tokens_per_step
        self._counted: int | None = None
        self._places = {id(optimizer): place for place, optimizer in enumerate(optimizers)}
        self._last_place = -1
        self._first_seen = False
        self._outer_call: FrameType | None = None
        self._in_step = False
        self._left = False
        self._optimizer_state: OptimizerSource = "fresh"
        exchange = self._exchange
        state = OptimizerState(optimizers, link.replica, lambda: exchange.totals.steps)
        self._courier = link.courier = StateCourier(link, state)
        self._run_tokens = link.run_tokens
        """As of the beginning of this step: what a schedule reads stands still for the length of a step."""
        link.journal.began_step(1, self._run_tokens)
        self._handles: list[Any] = []
        self._look_for_strangers(optimizers)
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def _look_for_strangers(self, optimizers: Sequence[Optimizer]) -> None:
        trained = [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]
        strangers = self._replica.strangers_among(trained)
        if strangers:
            few = f"{strangers} of {len(trained)} trained tensors"
            log.warning("%s: %s are not in the model that joined: only this island has them", self.name, few)

    def recover(self, keep: Path | None) -> None:
        """Give the optimizer a state, if the run is under way: the own one that was kept, a healthy peer's, or none."""
        if self._exchange.step > 0:
            self._optimizer_state = self._recovered(keep)
        self._courier.keep = keep

    def _recovered(self, keep: Path | None) -> OptimizerSource:
        link, state = self._link, self._courier.state
        kept = OptimizerState.read(keep, link.run_id) if keep is not None else None
        try:
            if kept is not None and is_recent(kept.step, self._exchange.step, self._exchange.sync.every):
                state.restore(kept.parts)
                link.restored("own", kept.origin, kept.journal)
                return "own"
        except WireError as error:
            log.warning("%s: the state that was kept cannot be used: %s", self.name, error)
        try:
            parts, origin = link.fetch_state()
            state.restore(parts)
            link.restored("peer", origin)
            return "peer"
        except WireError as error:
            log.warning("%s starts with a cold optimizer: %s", self.name, error)
            link.restored("cold")
            return "cold"

    # ------------------------------------------------------------ what a loop may look at

    @property
    def name(self) -> str:
        return self._link.name

    @property
    def slot(self) -> int:
        """This island's number in the run, from 0; a natural way to divide data."""
        return self._link.slot

    @property
    def step(self) -> int:
        """This island's place in the run."""
        return self._exchange.step

    @property
    def finished(self) -> bool:
        """The run is closing: leave the loop, then call `leave`."""
        return self._exchange.phase == "stopped"

    @property
    def connected(self) -> bool:
        return self._link.connected and not self._left

    @property
    def optimizer_state(self) -> OptimizerSource:
        """Where the optimizer's state came from: "fresh" at the start of a run; for one that joined later "own" (kept by the
        process before it), "peer", or "cold". With "cold" the first steps want a smaller learning rate."""
        return self._optimizer_state

    @property
    def quarantined(self) -> bool:
        """The syncer does not merge this learner's contributions at present, because several in a row were unhealthy."""
        return self._link.quarantined

    @property
    def failure(self) -> Exception | None:
        """Why this learner is no longer part of the run, if it is not."""
        return self._link.failure

    @property
    def run_tokens(self) -> int:
        """Tokens all islands together had trained on when this step began, as told by the syncer. Schedules follow this."""
        return self._run_tokens

    @property
    def progress(self) -> float:
        """Share of the run's budget that is spent; 0 for a run without a budget."""
        budget = self._exchange.sync.budget_tokens
        # Of a step all is settled when it begins. When there are no more steps, what was heard last counts.
        tokens = self._link.run_tokens if self.finished else self._run_tokens
        return min(1.0, tokens / budget) if budget else 0.0

    # ------------------------------------------------------------ what a loop may tell

    def count(self, tokens: int) -> None:
        """Tokens (or samples) that go into the current inner step. Without this every step counts `tokens_per_step`."""
        try:
            number = operator.index(tokens)
        except TypeError:
            number = -1
        if number < 0 or isinstance(tokens, bool):
            raise ValueError(f"tokens must be a whole number >= 0, got {tokens!r}")
        self._counted = (self._counted or 0) + number

    def sampler(self, size: int | Mapping[str, int], batch: int, *, seed: int = 0, batches_per_step: int = 1) -> LeasedSampler:
        """Data leased from the run, for `DataLoader(dataset, batch_sampler=learner.sampler(len(dataset), batch=8))`.

        Islands then share one seeded shuffle of the data: no item is trained on twice in an epoch, what an island had not
        finished when it died goes to another, and the run's ledger says what became of every sample. The loop ends when the run
        closes. Islands that do not call this bring their own data, as they like.

        Args:
            size: items of the data set, which must be the same on all islands; or several sizes by name. Batches are lists of
                items then, or of (name, item). A data set that `SyncConfig.pins` pins to a region is given to islands that
                joined with that region alone.
            batch: items in a list.
            seed: of the shuffle; the same on all islands.
            batches_per_step: lists that go into one inner step, for loops that accumulate gradients. Every inner step must use
                as many; where a loop reads batches and then does not step, it must call `skip_step`.
        """
        return LeasedSampler(self._link, size, batch, seed, batches_per_step)

    def skip_step(self) -> None:
        """The batches of one inner step were read from a sampler, and the step is not taken."""
        with self._link.changed:
            self._link.leases.skip_step()

    def leased(self, pools: Sequence[Pool], batch: int) -> LeasedRanges:
        """The same for loops that turn sample numbers into data themselves, one batch for a step."""
        return LeasedRanges(self._link, tuple(pools), batch)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """For whatever the loop does to the weights outside of `optimizer.step()`: Skerry neither reads nor writes them inside.

        A change that stays (a projection, clipped weights) counts as progress. Weights that are only lent, such as an average
        of past ones that is to be evaluated, must be given back before the end.
        """
        if self._in_step:
            raise RuntimeError("hold() is for what is done between two steps, not inside of one or after one that raised")
        self._take_gate()
        self._replica.before_write()
        try:
            yield
        finally:
            self._replica.after_write()
            self._open_gate()

    def report(self, loss: float) -> None:
        """The latest training loss: for display, and for `SyncConfig.rollback`."""
        self._link.loss = loss

    def leave(self, timeout_s: float = 60.0) -> None:
        """Hand over what is left, say goodbye and detach. Safe to call twice.

        Raises what `failure` holds if the learner was put out of the run or its exchange broke.
        """
        if self._left:
            return
        self._left = True
        for handle in self._handles:
            handle.remove()
        self._replica.between_steps = True  # what there is of a step of several optimizers is handed over
        self._open_gate()
        link = self._link
        with link.changed:
            self._exchange.stop()
        deadline = self._clock.now() + timeout_s
        try:
            link.leave()
            while True:
                self._adopt_ready()
                link.wake()
                with link.changed:
                    left = deadline - self._clock.now()
                    if link.goodbye is not None or link.failure is not None:
                        break
                    if left <= 0:
                        log.warning("%s left without a goodbye: no answer from the syncer in %.0f s", self.name, timeout_s)
                        break
                    if not self._exchange.adoptable():
                        link.changed.wait(min(left, 1.0))
            self._adopt_ready()
            if link.goodbye != OVER:  # a run that is over needs it no more
                self._courier.keep_now()
        finally:
            link.close()
        if link.failure is not None:
            raise link.failure

    def stop(self) -> None:
        """End training here, as if the run were closing: `finished` becomes true, and nothing waits any more."""
        with self._link.changed:
            self._exchange.stop()
            self._link.changed.notify_all()

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.leave()
        else:
            self.detach()

    def detach(self) -> None:
        """Drop out at once, as a crash would; what was not handed over is lost."""
        self._left = True
        for handle in self._handles:
            handle.remove()
        self._open_gate()
        self._link.close()

    # ------------------------------------------------------------ hooks

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        caller = sys._getframe(1)
        if self._outer_call is not None and _is_within(caller, self._outer_call):
            return  # an optimizer whose step() calls that of its base class: torch hooks both
        self._outer_call = caller
        if self._replica.is_captured():
            raise ConfigError("optimizer.step() cannot be part of a CUDA graph: Skerry would not hear of the steps it takes")
        place = self._places[id(optimizer)]
        if not self._first_seen:
            self._look_at_order(place)
        if self._last_place < 0 or place <= self._last_place:
            self._replica.keep_up()
        if place <= self._last_place:
            # The one before did not run to the last optimizer: some were skipped, or step() raised.
            self._step_done()
        if not self._in_step:
            self._take_gate()
            self._replica.between_steps = False
            self._replica.before_write()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if sys._getframe(1) is not self._outer_call:
            return
        self._outer_call = None
        place = self._places[id(optimizer)]
        self._last_place = place
        if place == len(self._places) - 1:
            self._step_done()
        else:
            self._replica.after_write()
            self._open_gate()

    def _look_at_order(self, place: int) -> None:
        """A scaler may skip the first of them, so this proves nothing; but if they are in another order, versions would be put
        into the model in the middle of an iteration."""
        self._first_seen = True
        if place > 0:
            which = f"number {place + 1} of {len(self._places)}"
            log.warning("%s: the first optimizer to step is %s; give them in their order", self.name, which)

    def _step_done(self) -> None:
        link = self._link
        link.pace.stepped(self._clock.now())
        tokens = self._tokens_per_step if self._counted is None else self._counted
        self._counted = None
        self._last_place = -1
        if not self._in_step:
            self._take_gate()
        self._replica.after_write()
        self._replica.between_steps = True
        with link.changed:
            samples = link.leases.step_done()
            for fragment in self._exchange.stepped(tokens, samples):
                link.staged[fragment] = self._replica.snapshot(fragment, self._exchange.totals.steps)
            adopt_ready(link)
            self._replica.step_done()
            steps, self._run_tokens = self._exchange.totals.steps, link.run_tokens
            link.journal.trained_on(steps, link.leases.last_step)
            link.journal.began_step(steps + 1, self._run_tokens)
        self._open_gate()
        link.step_done()
        self._wait_in_lock_step()

    def _take_gate(self) -> None:
        if not self._replica.gate.acquire(blocking=False):
            since = self._clock.now()
            self._replica.gate.acquire()
            self._link.pace.waited_s += self._clock.now() - since
        self._in_step = True

    def _open_gate(self) -> None:
        if self._in_step:
            self._in_step = False
            self._replica.gate.release()

    def _adopt_ready(self) -> None:
        """Put every version that may be adopted now into the model. The gate always comes before the lock."""
        with self._replica.gate, self._link.changed:
            adopt_ready(self._link)

    def _wait_in_lock_step(self) -> None:
        link = self._link
        since: float | None = None
        while True:
            with link.changed:
                if not self._exchange.must_wait():
                    break
                since = self._clock.now() if since is None else since
                if not self._exchange.adoptable():
                    link.changed.wait()
            self._adopt_ready()
            link.wake()
        if since is not None:
            link.pace.waited_s += self._clock.now() - since
            link.pace.waited(self._clock.now())


def is_recent(kept: int, step: int, every: int) -> bool:
    return step - kept <= max(OWN_STATE_ROUNDS * every, OWN_STATE_SHARE * step)


def _is_within(frame: FrameType, outer: FrameType) -> bool:
    """Is `outer` among the callers of `frame`? If not, its call has ended, by an exception."""
    caller = frame.f_back
    while caller is not None and caller is not outer:
        caller = caller.f_back
    return caller is not None


def adopt_ready(link: Link) -> None:
    """Called with the lock held, and the gate as well once training has begun."""
    exchange, replica = link.exchange, link.replica
    if exchange is None or replica is None:
        return
    adopted = False
    for version in exchange.adoptable():
        prepared = link.prepared.pop(version.fragment, None)
        if prepared is None:
            continue
        if not adopted:
            replica.before_write()
        try:
            whole = replica.adopt(version.fragment, prepared, exchange.uncounted_since(version).steps, version.counted)
        except ConfigError as error:
            link.fail(error)
            raise
        link.journal.adopted(exchange.totals.steps, version.fragment, version.version, whole)
        exchange.adopted(version)
        link.staged.pop(version.fragment, None)  # which holds the version before and a copy on the device
        adopted = True
    if adopted:
        replica.after_write()
        link.wake()


def _check_one_process(model: nn.Module) -> None:
    """Ranks that average gradients and adopt versions each at its own moment would drift apart without anybody noticing."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) and dist.get_world_size(module.process_group) > 1:
            raise ConfigError("an island is one process: one that is trained by several ranks (DDP) cannot join")
    if sharded := [name for name, parameter in model.named_parameters() if hasattr(parameter, "placements")]:
        raise ConfigError(f"an island is one process: {sharded[0]} is spread over several ranks (FSDP, tensor parallel)")


def join(
    address: str,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    name: str | None = None,
    tokens_per_step: int = 1,
    tls: TLS | None = None,
    timeout_s: float = 120.0,
    keep: str | Path | None = None,
    region: str = "",
    connections: int = CONNECTIONS,
    cap_mbit: float = 0.0,
    clock: Clock | None = None,
) -> Learner:
    """Attach this process to the run that the syncer at `address` serves.

    Returns once the model holds the run's current weights and the syncer has given the start. From then on
    `optimizer.step()` counts, sends and adopts. Several optimizers are given in the order in which they step: an inner step is
    done when the last of the list has stepped.

    Args:
        name: stays the same when the island is restarted, so that it takes its old place; by default host and process.
        tokens_per_step: how much one inner step counts in merging, unless `learner.count` says so step by step.
        tls: certificate files; by default from SKERRY_TLS_CA, SKERRY_TLS_CERT and SKERRY_TLS_KEY. Needed off loopback.
        timeout_s: how long to look for the syncer. Waiting for the other islands to start is not limited.
        keep: a folder on this machine in which the optimizer's state is written from time to time, so that a process that
            takes this one's place finds it there. Without it, and on another machine, the state comes from a peer.
        region: where this island is, for data that is pinned to a region.
        connections: over how many connections large fragments are spread; one alone cannot fill a long link.
        cap_mbit: Mbit/s that this island may use each way; 0 means no limit.
    """
    if connections < 1 or cap_mbit < 0:
        raise ValueError(f"connections must be >= 1 and cap_mbit >= 0, got {connections!r} and {cap_mbit!r}")
    if not isinstance(tokens_per_step, int) or tokens_per_step < 1:
        raise ValueError(f"tokens_per_step must be a whole number >= 1, got {tokens_per_step!r}")
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
        raise ValueError(f"optimizer must be a torch optimizer or a list of them, got {optimizer!r}")
    _check_one_process(model)
    clock = clock or SystemClock()
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    link = Link(address, model, name, tls or TLS.from_environment(), clock, region, connections, cap_mbit)
    link.start()
    deadline = clock.now() + timeout_s
    try:
        with link.changed:
            while not (link.fixed_loaded and link.exchange is not None and link.exchange.phase == "training"):
                if link.failure is not None:
                    raise link.failure
                if link.goodbye is not None:
                    raise WireError(f"the syncer at {address} turned {name} away: {link.goodbye}")
                left = deadline - clock.now()
                if left <= 0 and not link.connected:
                    raise WireError(f"no syncer answered at {address} within {timeout_s:.0f} s: {link.last_error}")
                link.changed.wait(1.0)
                adopt_ready(link)
    except BaseException:
        link.close()
        raise
    learner = Learner(link, optimizers, tokens_per_step, clock)
    try:
        learner.recover(Path(keep) / f"{quote(name, safe='')}.optimizer.safetensors" if keep is not None else None)
    except BaseException:
        learner.detach()
        raise
    return learner
