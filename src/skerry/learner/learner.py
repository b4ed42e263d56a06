"""An island's part in a run, as its training loop sees it. Made by `skerry.join`.

Everything on the training thread happens in optimizer hooks: before a step the gate closes; after it the step is counted,
fetched fragments are adopted, and the gate opens. Outside lock-step nothing here waits for the network.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from torch.optim import Optimizer

from skerry.core.leases.ranges import Pool
from skerry.core.messages import OVER
from skerry.errors import ConfigError, WireError
from skerry.learner.connection import Connection
from skerry.learner.hooks import StepHooks
from skerry.learner.sampler import LeasedRanges, LeasedSampler
from skerry.learner.seams import Seams
from skerry.learner.session import Session
from skerry.learner.state.courier import StateCourier
from skerry.learner.state.optimizer_state import OptimizerState
from skerry.wire import skerry_pb2 as pb

log = logging.getLogger("skerry.learner")

OptimizerSource = Literal["fresh", "own", "peer", "cold"]
OWN_STATE_ROUNDS, OWN_STATE_SHARE = 10, 0.1
"""A state that was kept is used if it is not older than this many times H steps, or this share of the run so far."""


class Learner:
    """An island's part in a run. Made by `join`."""

    def __init__(
        self,
        connection: Connection,
        session: Session,
        optimizers: Sequence[Optimizer],
        tokens_per_step: int,
        seams: Seams,
    ) -> None:
        self._connection, self._session = connection, session
        self._exchange, self._replica = session.exchange, session.replica
        self._clock, self._after_step = seams.clock, seams.after_step
        self._tokens_per_step = tokens_per_step
        self._counted: int | None = None
        self._in_step = False
        self._left = False
        self._optimizer_state: OptimizerSource = "fresh"
        state = OptimizerState(optimizers, session.replica, lambda: session.exchange.totals.steps)
        self._courier = StateCourier(session, connection.background, state)
        connection.keep_state(self._courier)
        self._run_tokens = session.run_tokens
        """As of the beginning of this step: what a schedule reads does not change within a step."""
        session.journal.began_step(1, self._run_tokens)
        self._warn_of_strangers(optimizers)
        self._hooks = StepHooks(
            optimizers,
            new_step=self._keep_up,
            begin=self._begin_step,
            part_done=self._part_done,
            done=self._step_done,
            name=session.name,
        )

    def _warn_of_strangers(self, optimizers: Sequence[Optimizer]) -> None:
        trained = [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]
        strangers = self._replica.strangers_among(trained)
        if strangers:
            few = f"{strangers} of {len(trained)} trained tensors"
            log.warning("%s: %s are not in the model that joined: only this island has them", self.name, few)

    def recover(self, keep: Path | None) -> None:
        """Give the optimizer a state, if the run has begun: its own that was kept, a healthy peer's, or none."""
        if self._exchange.step > 0:
            self._optimizer_state = self._recovered(keep)
        self._courier.keep = keep

    def _recovered(self, keep: Path | None) -> OptimizerSource:
        session, state = self._session, self._courier.state
        kept = OptimizerState.read(keep, session.run_id) if keep is not None else None
        try:
            if kept is not None and is_recent(kept.step, self._exchange.step, session.sync.every):
                state.restore(kept.parts)
                self._restored("own", kept.origin, kept.journal)
                return "own"
        except WireError as error:
            log.warning("%s: the state that was kept cannot be used: %s", self.name, error)
        try:
            parts, origin = self._courier.fetch()
            state.restore(parts)
            self._restored("peer", origin)
            return "peer"
        except WireError as error:
            log.warning("%s starts with a cold optimizer: %s", self.name, error)
            self._restored("cold")
            return "cold"

    def _restored(self, source: str, origin: Sequence[tuple[str, int]] = (), inherited: str = "") -> None:
        """`origin` says for each part whose it was after how many steps; `inherited` is what that session had not handed over
        of its journal."""
        with self._session.lock:
            self._session.journal.restored(source, origin, inherited)
        self._connection.send(pb.ToSyncer(restored=pb.Restored(source=source)))

    # ------------------------------------------------------------ what a loop may look at

    @property
    def name(self) -> str:
        return self._session.name

    @property
    def slot(self) -> int:
        """This island's number in the run, from 0; a natural way to divide data."""
        return self._session.slot

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
        return self._session.connected and not self._left

    @property
    def optimizer_state(self) -> OptimizerSource:
        """Where the optimizer's state came from: "fresh" at the start of a run; for a later joiner "own" (kept by the process
        before it), "peer", or "cold". With "cold" the first steps want a smaller learning rate."""
        return self._optimizer_state

    @property
    def quarantined(self) -> bool:
        """The syncer does not merge this learner's contributions at present, because several in a row were unhealthy."""
        return self._session.quarantined

    @property
    def failure(self) -> Exception | None:
        """Why this learner is no longer part of the run, if it is not."""
        return self._session.failure

    @property
    def run_tokens(self) -> int:
        """Tokens all islands together had trained on when this step began, as told by the syncer. Schedules follow this."""
        return self._run_tokens

    @property
    def progress(self) -> float:
        """Share of the run's budget that is spent; 0 for a run without a budget."""
        budget = self._session.sync.budget_tokens
        # Within a step nothing changes. When there are no more steps, what was heard last counts.
        tokens = self._session.run_tokens if self.finished else self._run_tokens
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
        finished when it died goes to another, and the run's ledger accounts for every sample. The loop ends when the run
        closes. Islands that do not call this bring their own data, as they like.

        Args:
            size: items in the data set, the same on all islands; or several sizes by name. Batches are lists of items then, or
                of (name, item). A data set that `SyncConfig.pins` pins to a region is given only to islands that joined with
                that region.
            batch: items in a list.
            seed: seed of the shuffle; the same on all islands.
            batches_per_step: lists that go into one inner step, for loops that accumulate gradients. Every inner step must use
                as many; a loop that reads batches and then does not step must call `skip_step`.
        """
        return LeasedSampler(self._connection, self._session, size, batch, seed, batches_per_step, self._clock)

    def skip_step(self) -> None:
        """The batches of one inner step were read from a sampler, and the step is not taken."""
        with self._session.lock:
            self._session.leases.skip_step()

    def leased(self, pools: Sequence[Pool], batch: int) -> LeasedRanges:
        """The same for loops that turn sample numbers into data themselves, one batch per step."""
        return LeasedRanges(self._connection, self._session, tuple(pools), batch, clock=self._clock)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """For whatever the loop does to the weights outside of `optimizer.step()`: Skerry neither reads nor writes them inside.

        A change that stays (a projection, clipped weights) counts as progress. Weights that are only swapped in, such as an
        average that is to be evaluated, must be swapped out again before the end.
        """
        if self._in_step:
            raise RuntimeError("hold() is for what is done between two steps, not inside of one or after one that raised")
        self._take_gate()
        self._replica.model_device.before_write()
        try:
            yield
        finally:
            self._replica.model_device.after_write()
            self._open_gate()

    def report(self, loss: float) -> None:
        """The latest training loss: for display, and for `SyncConfig.rollback`."""
        self._session.loss = loss

    def leave(self, timeout_s: float = 60.0) -> None:
        """Hand over what is left, say goodbye and detach. Safe to call twice.

        Raises what `failure` holds if the learner was put out of the run or its exchange broke.
        """
        if self._left:
            return
        self._left = True
        self._hooks.remove()
        self._replica.between_steps = True  # an unfinished step of several optimizers is handed over as it is
        self._open_gate()
        session = self._session
        with session.lock:
            self._exchange.stop()
        deadline = self._clock.now() + timeout_s
        try:
            self._connection.leave()
            while True:
                self._adopt_ready()
                session.wake()
                with session.lock:
                    left = deadline - self._clock.now()
                    if session.goodbye is not None or session.failure is not None:
                        break
                    if left <= 0:
                        log.warning("%s left without a goodbye: no answer from the syncer in %.0f s", self.name, timeout_s)
                        break
                    if not self._exchange.adoptable():
                        session.lock.wait(min(left, 1.0))
            self._adopt_ready()
            if session.goodbye != OVER:  # a run that is over needs it no more
                self._courier.keep_now()
        finally:
            self._connection.close()
        if session.failure is not None:
            raise session.failure

    def stop(self) -> None:
        """End training here, as if the run were closing: `finished` becomes true, and nothing waits any more."""
        with self._session.lock:
            self._exchange.stop()
            self._session.lock.notify_all()

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
        self._hooks.remove()
        self._open_gate()
        self._connection.close()

    # ------------------------------------------------------------ steps

    def _keep_up(self) -> None:
        if self._replica.is_captured():
            raise ConfigError("optimizer.step() cannot be part of a CUDA graph: Skerry would not hear of the steps it takes")
        self._replica.model_device.keep_up()

    def _begin_step(self) -> None:
        if not self._in_step:
            self._take_gate()
            self._replica.between_steps = False
            self._replica.model_device.before_write()

    def _part_done(self) -> None:
        self._replica.model_device.after_write()
        self._open_gate()

    def _step_done(self) -> None:
        session, exchange = self._session, self._exchange
        session.pace.stepped(self._clock.now())
        tokens = self._tokens_per_step if self._counted is None else self._counted
        self._counted = None
        if not self._in_step:
            self._take_gate()
        self._replica.model_device.after_write()
        self._replica.between_steps = True
        with session.lock:
            samples = session.leases.step_done()
            for fragment in exchange.stepped(tokens, samples):
                session.staged[fragment] = self._replica.snapshot(fragment, exchange.totals.steps)
            session.adopt_ready()
            self._replica.model_device.step_done()
            steps, self._run_tokens = exchange.totals.steps, session.run_tokens
            session.journal.trained_on(steps, session.leases.last_step)
            session.journal.began_step(steps + 1, self._run_tokens)
        self._open_gate()
        self._connection.transfers.step_done()
        self._wait_in_lock_step()
        self._after_step()

    def _take_gate(self) -> None:
        if not self._replica.gate.acquire(blocking=False):
            since = self._clock.now()
            self._replica.gate.acquire()
            self._session.pace.waited_s += self._clock.now() - since
        self._in_step = True

    def _open_gate(self) -> None:
        if self._in_step:
            self._in_step = False
            self._replica.gate.release()

    def _adopt_ready(self) -> None:
        """The gate always comes before the lock."""
        with self._replica.gate, self._session.lock:
            self._session.adopt_ready()

    def _wait_in_lock_step(self) -> None:
        session = self._session
        since: float | None = None
        while True:
            with session.lock:
                if not self._exchange.must_wait():
                    break
                since = self._clock.now() if since is None else since
                if not self._exchange.adoptable():
                    session.lock.wait()
            self._adopt_ready()
            session.wake()
        if since is not None:
            session.pace.waited_s += self._clock.now() - since
            session.pace.waited(self._clock.now())


def is_recent(kept: int, step: int, every: int) -> bool:
    return step - kept <= max(OWN_STATE_ROUNDS * every, OWN_STATE_SHARE * step)
