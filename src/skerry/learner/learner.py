"""The handle that `skerry.join` returns to a training loop.

All work on the training thread happens in optimizer hooks. The gate closes before a step. After the step, the hooks count it,
adopt fetched fragments and open the gate. Outside lock-step they never wait for the network.
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
"""A kept optimizer state is recent if it is at most OWN_STATE_ROUNDS * H steps or OWN_STATE_SHARE of the run behind."""


class Learner:
    """One island's membership in a run, as its training loop sees it. Create it with `skerry.join`.

    Use it as a context manager: a normal exit calls `leave`, an exception calls `detach`. While the syncer is away, training
    goes on (except in lock-step) and the connection is retried in the background. If the island is put out of the run,
    `finished` becomes true and `failure` says why.
    """

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
        """Sampled when a step begins, so that a schedule reads the same number throughout the step."""
        session.journal.began_step(1, self._run_tokens)
        self._warn_of_unknown(optimizers)
        self._hooks = StepHooks(
            optimizers,
            new_step=self._keep_up,
            begin=self._begin_step,
            part_done=self._part_done,
            done=self._step_done,
            name=session.name,
        )

    def _warn_of_unknown(self, optimizers: Sequence[Optimizer]) -> None:
        trained = [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]
        unknown = self._replica.count_unknown(trained)
        if unknown:
            share = f"{unknown} of {len(trained)} trained tensors"
            log.warning("%s: %s are not in the model that joined: other islands never see them", self.name, share)

    def recover(self, keep: Path | None) -> None:
        """If the run has already begun, restore the optimizer state: from `keep`, else from a healthy peer, else not at all.

        From now on the state is saved to `keep` periodically. `join` calls this.
        """
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
            log.warning("%s: the kept optimizer state cannot be used: %s", self.name, error)
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
        """Record where the state came from: `origin` has the session and its step count for each part, `inherited` the journal
        entries which that session had not handed over."""
        with self._session.lock:
            self._session.journal.restored(source, origin, inherited)
        self._connection.send(pb.ToSyncer(restored=pb.Restored(source=source)))

    # ------------------------------------------------------------ what a loop may read

    @property
    def name(self) -> str:
        """Name of this island."""
        return self._session.name

    @property
    def slot(self) -> int:
        """Number of this island in the run, from 0. Use it to divide data when you do not lease it with `sampler`."""
        return self._session.slot

    @property
    def step(self) -> int:
        """Step of the run that this island has reached."""
        return self._exchange.step

    @property
    def finished(self) -> bool:
        """Whether to stop training: the run is closing, `stop` was called, or this island was put out of the run. Leave the
        loop, then call `leave`."""
        return self._exchange.phase == "stopped"

    @property
    def connected(self) -> bool:
        """Whether the syncer is connected right now. Training goes on either way."""
        return self._session.connected and not self._left

    @property
    def optimizer_state(self) -> OptimizerSource:
        """Where the optimizer state came from.

        "fresh" when joining at the start of a run. When joining later: "own" (kept by the previous process of this name),
        "peer" (copied from another island) or "cold" (none found: use a smaller learning rate for the first steps).
        """
        return self._optimizer_state

    @property
    def quarantined(self) -> bool:
        """Whether the syncer currently refuses to merge this island, because several contributions in a row were unhealthy."""
        return self._session.quarantined

    @property
    def failure(self) -> Exception | None:
        """Why this island is no longer part of the run; None while it is."""
        return self._session.failure

    @property
    def run_tokens(self) -> int:
        """Tokens that all islands together had trained on when this step began, as last reported by the syncer. Use it to
        drive learning-rate schedules."""
        return self._run_tokens

    @property
    def progress(self) -> float:
        """Share of the run's token budget that is spent, 0 to 1; 0 for a run without a budget."""
        budget = self._session.sync.budget_tokens
        # No step follows the last one, so the newest count is safe to use then.
        tokens = self._session.run_tokens if self.finished else self._run_tokens
        return min(1.0, tokens / budget) if budget else 0.0

    # ------------------------------------------------------------ what a loop may call

    def count(self, tokens: int) -> None:
        """Add tokens (or samples) to the current inner step.

        Steps without a call count `tokens_per_step`. Raises ValueError if `tokens` is not a whole number >= 0.
        """
        try:
            number = operator.index(tokens)
        except TypeError:
            number = -1
        if number < 0 or isinstance(tokens, bool):
            raise ValueError(f"tokens must be a whole number >= 0, got {tokens!r}")
        self._counted = (self._counted or 0) + number

    def sampler(self, size: int | Mapping[str, int], batch: int, *, seed: int = 0, batches_per_step: int = 1) -> LeasedSampler:
        """Lease data from the run, as a batch sampler for a torch DataLoader.

            loader = DataLoader(dataset, batch_sampler=learner.sampler(len(dataset), batch=8))

        All islands share one seeded shuffle: no item is trained on twice in an epoch, items leased to an island that dies go
        to another island, and the run's ledger accounts for every sample. Iteration ends when the run closes. Islands that
        do not lease bring their own data.

        Args:
            size: number of items in the data set, the same on all islands. For several data sets, a mapping of name to size;
                batches then hold (name, item) pairs. A data set that `SyncConfig.pins` pins to a region is leased only to
                islands that joined with that region.
            batch: items per batch.
            seed: seed of the shuffle, the same on all islands.
            batches_per_step: batches per inner step, for gradient accumulation. Every inner step must use exactly this many;
                call `skip_step` if the loop reads them and does not step.

        Raises:
            ValueError: a size, `batch` or `batches_per_step` is below 1.
            ConfigError: while iterating, if the syncer leases no such data to this island.
            WireError: while iterating, if there is no data yet and the syncer stays away.
        """
        return LeasedSampler(self._connection, self._session, size, batch, seed, batches_per_step, self._clock)

    def skip_step(self) -> None:
        """Give up the batches read from a sampler for one inner step that is not taken."""
        with self._session.lock:
            self._session.leases.skip_step()

    def leased(self, pools: Sequence[Pool], batch: int) -> LeasedRanges:
        """Lease ranges of sample numbers, one batch per step, for loops that turn them into data themselves."""
        return LeasedRanges(self._connection, self._session, tuple(pools), batch, clock=self._clock)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep Skerry from reading or writing the weights while the loop changes them outside `optimizer.step()`.

            with learner.hold():
                clip_weights(model)

        A lasting change, such as a projection or clipping, counts as progress. Temporary weights, such as an average to be
        evaluated, must be swapped back before the block ends. Raises RuntimeError inside a step or after a step that raised.
        """
        if self._in_step:
            raise RuntimeError("hold() works only between two steps, not inside a step or after a step that raised")
        self._take_gate()
        self._replica.model_device.before_write()
        try:
            yield
        finally:
            self._replica.model_device.after_write()
            self._open_gate()

    def report(self, loss: float) -> None:
        """Report the latest training loss, for display and for `SyncConfig.rollback`."""
        self._session.loss = loss

    def leave(self, timeout_s: float = 60.0) -> None:
        """Hand over the remaining progress, say goodbye and detach. Safe to call twice.

        Waits at most `timeout_s` for the syncer, then detaches with a warning. Raises `failure` if this island was put out of
        the run or a bug stopped the exchange.
        """
        if self._left:
            return
        self._left = True
        self._hooks.remove()
        self._replica.between_steps = True  # with several optimizers, a half-done step is handed over as it is
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
                        log.warning("%s left without a goodbye: the syncer did not answer in %.0f s", self.name, timeout_s)
                        break
                    if not self._exchange.adoptable():
                        session.lock.wait(min(left, 1.0))
            self._adopt_ready()
            if session.goodbye != OVER:  # nobody resumes a run that is over
                self._courier.keep_now()
        finally:
            self._connection.close()
        if session.failure is not None:
            raise session.failure

    def stop(self) -> None:
        """Make `finished` true and wake the loop if it waits, as if the run were closing. Safe to call from any thread."""
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
        """Drop out at once, as a crash would. Progress that was not handed over is lost."""
        self._left = True
        self._hooks.remove()
        self._open_gate()
        self._connection.close()

    # ------------------------------------------------------------ steps

    def _keep_up(self) -> None:
        self._check_not_captured()  # before anything waits for the device
        self._replica.model_device.keep_up()

    def _check_not_captured(self) -> None:
        if self._replica.is_captured():
            raise ConfigError("optimizer.step() cannot be part of a CUDA graph: replaying the graph skips Skerry's step hooks")

    def _begin_step(self) -> None:
        self._check_not_captured()
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
        with self._replica.gate, self._session.lock:  # lock order: gate, then lock
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


def is_recent(kept_step: int, step: int, every: int) -> bool:
    """Whether an optimizer state kept at `kept_step` is still better than a peer's."""
    return step - kept_step <= max(OWN_STATE_ROUNDS * every, OWN_STATE_SHARE * step)
