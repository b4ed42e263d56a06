"""Account for every sample and every token, computed and checked from the tape alone.

Each time a sample is leased to a process, it ends as
    applied     in a merged contribution of that process, for at least one fragment
    dropped     in no merge although the process kept it: replaced by a merged version, refused, or part of a contribution that
                was never merged
    returned    given back, to be leased again
    open        still held, or held when the run ended

Tokens are counted per fragment, because fragments are merged separately. Tokens a process trained on are
    applied     in a merged contribution
    replaced    in no contribution, because a merged version overwrote them first
    lost        trained on after the last merged contribution of a process that has ended
    open        the same for a process that still runs

docs/operate.md explains the terms. Every contradiction is reported as a discrepancy.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skerry.core import records
from skerry.core.leases.ranges import Leases
from skerry.core.schema import TapeRecord
from skerry.syncer.storage.run_folder import read_identity, read_tape

KINDS = (
    records.Joined,
    records.Left,
    records.Banked,
    records.Ended,
    records.Leased,
    records.Returned,
    records.Merged,
    records.TapeGap,
    records.TapeRecovered,
)
MUCH_REPLACED = 0.2
"""Replaced share above which the summary warns. τ of every H steps are replaced by design; more suggests bad settings."""
Span = tuple[int, int]
"""Start, stop."""


@dataclass
class Leasing:
    """The leases and merged work of one process."""

    learner: str
    session: str
    given: list[tuple[int, str, int, int]] = field(default_factory=list)
    """Position, pool, first number, count."""
    returned: list[Span] = field(default_factory=list)
    """Positions."""
    applied: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    """Fragment → positions."""
    merged: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    """Fragment → tokens, counted over all the process trained on."""
    trained: int = 0
    """Tokens, by the last report."""
    ended: bool = False

    @property
    def total(self) -> int:
        return self.given[-1][0] + self.given[-1][3] if self.given else 0


@dataclass
class TokenAccount:
    """What became of the trained tokens, for one fragment."""

    applied: int = 0
    replaced: int = 0
    lost: int = 0
    open: int = 0


@dataclass
class Ledger:
    leased: int = 0
    applied: int = 0
    dropped: int = 0
    returned: int = 0
    open: int = 0
    numbers: dict[str, int] = field(default_factory=dict)
    """Pool → number of distinct samples ever leased."""
    waiting: dict[str, int] = field(default_factory=dict)
    """Pool → number of samples that were returned and not leased again."""
    trained: int = 0
    """Tokens all processes trained on."""
    tokens: list[TokenAccount] = field(default_factory=list)
    """What became of them, by fragment."""
    discrepancies: list[str] = field(default_factory=list)
    incomplete: bool = False
    """Records are missing from the tape, because the disk was full for too long."""
    recovered: bool = False
    """The tape was damaged and lost records, so the sums cannot be checked."""

    @property
    def adds_up(self) -> bool:
        return not self.discrepancies or self.recovered

    def to_json(self) -> dict[str, Any]:
        return {
            "samples": {
                "leased": self.leased,
                "applied": self.applied,
                "dropped": self.dropped,
                "returned": self.returned,
                "open": self.open,
            },
            "numbers": self.numbers,
            "waiting": self.waiting,
            "trained": self.trained,
            "tokens": [vars(account) for account in self.tokens],
            "discrepancies": self.discrepancies,
            "adds_up": self.adds_up,
            "incomplete": self.incomplete,
            "recovered": self.recovered,
        }


class Auditor:
    """Takes tape records one by one, in order."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._leasings: dict[str, Leasing] = {}
        self._present: dict[str, str] = {}
        """Learner → session of its current process."""
        self._holders: dict[str, list[tuple[int, int, str | None]]] = defaultdict(list)
        """Pool → every sample number ever leased, as ordered spans with the session that holds them; None once returned."""
        self._ended = False
        self._ledger = Ledger(tokens=[TokenAccount() for _ in range(fragments)])

    def apply(self, record: TapeRecord) -> None:
        if isinstance(record, records.Joined):
            before = self._present.get(record.learner)
            if before not in (None, record.session):
                self._end(before)
            self._present[record.learner] = record.session
            self._of(record.session, record.learner).ended = False
        elif isinstance(record, records.Left):
            self._end(self._present.get(record.learner))
        elif isinstance(record, records.Banked):
            self.trained(record.session, record.learner, record.tokens)
            self._end(record.session)
        elif isinstance(record, records.Ended):
            self._ended = True
        elif isinstance(record, records.Leased):
            self._leased(record)
        elif isinstance(record, records.Returned):
            self._returned(record)
        elif isinstance(record, records.Merged):
            self._merged(record)
        elif isinstance(record, records.TapeGap):
            self._ledger.incomplete = True
        elif isinstance(record, records.TapeRecovered):
            self._ledger.recovered = True

    def trained(self, session: str, learner: str, tokens: int) -> None:
        """Note how many tokens a process reported."""
        leasing = self._of(session, learner)
        leasing.trained = max(tokens, leasing.trained)

    # ------------------------------------------------------------ records

    def _wrong(self, what: str) -> None:
        self._ledger.discrepancies.append(what)

    def _of(self, session: str, learner: str) -> Leasing:
        return self._leasings.setdefault(session, Leasing(learner, session))

    def _end(self, session: str | None) -> None:
        if session is not None and session in self._leasings:
            self._leasings[session].ended = True

    def _leased(self, lease: records.Leased) -> None:
        leasing = self._of(lease.session, lease.learner)
        if lease.position != leasing.total:
            self._wrong(f"{leasing.learner} was leased position {lease.position}, expected {leasing.total}")
        leasing.given.append((lease.position, lease.pool, lease.start, lease.count))
        self._hand_over(lease.pool, (lease.start, lease.start + lease.count), None, leasing.session)

    def _returned(self, returned: records.Returned) -> None:
        leasing = self._of(returned.session, returned.learner)
        end = returned.position + sum(count for _, _, count in returned.ranges)
        leasing.returned.append((returned.position, end))
        if end != leasing.total:
            self._wrong(f"{leasing.learner} returned samples up to {end}, but was leased {leasing.total}")
        for pool, start, count in returned.ranges:
            self._hand_over(pool, (start, start + count), leasing.session, None)

    def _hand_over(self, pool: str, numbers: Span, before: str | None, after: str | None) -> None:
        """Move sample numbers from one holder to another, and check that `before` held them."""
        start, stop = numbers
        spans = self._holders[pool]
        frontier = spans[-1][1] if spans else 0
        if start > frontier or (stop > frontier and before is not None):
            self._wrong(f"samples {start} to {stop} of pool {pool!r} change hands, but only {frontier} were ever leased")
        first = max(0, bisect.bisect(spans, start, key=lambda span: span[0]) - 1)
        last = bisect.bisect_left(spans, stop, key=lambda span: span[0])
        kept: list[tuple[int, int, str | None]] = []
        for a, b, holder in spans[first:last]:
            left, right = max(a, start), min(b, stop)
            if left < right and holder != before:
                self._wrong(
                    f"samples {left} to {right} of pool {pool!r} were held by {_short(holder)}, expected {_short(before)}"
                )
            kept += [(x, y, holder) for x, y in ((a, min(b, start)), (max(a, stop), b)) if x < y]
        spans[first:last] = _joined([*kept, (start, stop, after)])

    def _merged(self, merge: records.Merged) -> None:
        for share in merge.shares:
            leasing = self._of(share.session, share.learner)
            leasing.merged[merge.fragment].append((share.at_tokens - share.tokens, share.at_tokens))
            start, stop = share.samples
            if stop > leasing.total:
                self._wrong(f"{leasing.learner} contributed samples up to {stop}, but was leased {leasing.total}")
            if stop > start:
                leasing.applied[merge.fragment].append((start, stop))

    # ------------------------------------------------------------ totals

    def ledger(self) -> Ledger:
        ledger = self._ledger
        ledger.leased = ledger.applied = ledger.dropped = ledger.returned = ledger.open = 0
        ledger.tokens = [TokenAccount() for _ in range(self._fragments)]
        for leasing in self._leasings.values():
            self._add_samples(leasing)
            self._add_tokens(leasing)
        ledger.trained = sum(leasing.trained for leasing in self._leasings.values())
        for pool, spans in self._holders.items():
            ledger.numbers[pool] = sum(stop - start for start, stop, _ in spans)
            ledger.waiting[pool] = sum(stop - start for start, stop, holder in spans if holder is None)
        self._check_numbers()
        parts = ledger.applied + ledger.dropped + ledger.returned + ledger.open
        if ledger.leased != parts:
            self._wrong(f"{ledger.leased} samples were leased, but {parts} are accounted for")
        again = ledger.returned - sum(ledger.waiting.values())
        distinct = sum(ledger.numbers.values())
        if ledger.leased - again != distinct:
            self._wrong(f"{ledger.leased} leases less {again} repeated ones do not match {distinct} distinct samples")
        return ledger

    def _add_samples(self, leasing: Leasing) -> None:
        for fragment, spans in [*leasing.applied.items(), *leasing.merged.items()]:
            ordered = sorted(spans)
            for (_, end), (start, _) in itertools.pairwise(ordered):
                if start < end:
                    self._wrong(f"{start} to {end} of {leasing.learner} are in fragment {fragment} twice")
        applied = _union(span for spans in leasing.applied.values() for span in spans)
        returned = _union(leasing.returned)
        if _length(applied) + _length(returned) != _length(_union([*applied, *returned])):
            self._wrong(f"samples that {leasing.learner} returned are also in its own merged contributions")
        last = max([stop for _, stop in [*applied, *returned]], default=0)
        rest = leasing.total - last
        ledger = self._ledger
        ledger.leased += sum(count for _, _, _, count in leasing.given)
        ledger.applied += _length(applied)
        ledger.returned += _length(returned)
        ledger.open += 0 if leasing.ended else rest
        ledger.dropped += last - _length(applied) - _length(returned) + (rest if leasing.ended else 0)

    def _add_tokens(self, leasing: Leasing) -> None:
        for fragment, account in enumerate(self._ledger.tokens):
            spans = leasing.merged[fragment]
            applied, last = _length(spans), max((stop for _, stop in spans), default=0)
            if last > leasing.trained:
                self._wrong(f"{leasing.learner} trained on {leasing.trained} tokens, but fragment {fragment} contains {last}")
            account.applied += applied
            account.replaced += last - applied
            if leasing.ended or self._ended:
                account.lost += leasing.trained - last
            else:
                account.open += leasing.trained - last

    def _check_numbers(self) -> None:
        """Check that no sample was applied by two processes."""
        applied: dict[str, list[Span]] = defaultdict(list)
        for leasing in self._leasings.values():
            spans = _union(span for spans in leasing.applied.values() for span in spans)
            following = 0
            for position, pool, start, count in leasing.given:
                while following < len(spans) and spans[following][1] <= position:
                    following += 1
                for a, b in itertools.islice(spans, following, None):
                    if a >= position + count:
                        break
                    left, right = max(a, position), min(b, position + count)
                    applied[pool].append((start + left - position, start + right - position))
        for pool, spans in applied.items():
            ordered = sorted(spans)
            for (_, end), (start, _) in itertools.pairwise(ordered):
                if start < end:
                    self._wrong(f"samples {start} to {end} of pool {pool!r} are applied by two processes")


def audit_run(folder: Path) -> Ledger:
    """The ledger of a run folder. Safe while a syncer is running."""
    auditor = Auditor(len(read_identity(folder).layout.fragments))
    standing = read_tape(folder, KINDS, auditor.apply)
    for name, (session, _, _, tokens) in standing.sessions.items():
        auditor.trained(session, name, tokens)
    ledger = auditor.ledger()
    # The syncer keeps its own counts; both must agree.
    if ledger.trained != standing.tokens:
        ledger.discrepancies.append(f"the syncer counted {standing.tokens} tokens, the tape {ledger.trained}")
    leases = Leases()
    leases.restore(standing.leases)
    counted = {name: (pool.given, pool.waiting) for name, pool in leases.pools.items() if pool.given}
    found = {name: (count, ledger.waiting[name]) for name, count in ledger.numbers.items()}
    if counted != found:
        ledger.discrepancies.append(f"the syncer counted (leased, waiting) {counted}, the tape {found}")
    return ledger


def ledger_summary(ledger: Ledger, sizes: Sequence[int]) -> str:
    """One or two lines for the end of a run."""
    if not ledger.trained:
        return ""
    shares = {word: _mean(ledger, word, sizes) / ledger.trained for word in ("applied", "replaced", "lost")}
    lines = [
        f"in the model     {shares['applied']:.1%} of trained tokens; {shares['replaced']:.1%} replaced by a merge first, "
        f"{shares['lost']:.1%} lost"
    ]
    if shares["replaced"] > MUCH_REPLACED:
        lines.append(
            "                 exchanges take long compared with sync.every steps; raise sync.every, or make steps longer"
        )
    if not ledger.adds_up:
        lines.append("                 THE LEDGER DOES NOT ADD UP: see skerry ledger")
    return "\n".join(lines)


def _mean(ledger: Ledger, word: str, sizes: Sequence[int]) -> float:
    """Mean of a token count over the whole model, weighted by fragment size."""
    whole = sum(sizes) or 1
    return float(sum(size * getattr(account, word) for size, account in zip(sizes, ledger.tokens, strict=True)) / whole)


def ledger_lines(ledger: Ledger, sizes: Sequence[int]) -> str:
    """The whole ledger as text. `sizes` are the numbers of parameters of the fragments."""
    lines = []
    if ledger.leased:
        lines.append(f"samples leased {ledger.leased:>16,}")
        for word in ("applied", "dropped", "returned", "open"):
            lines.append(f"  {word:<12} {getattr(ledger, word):>16,}")
        for pool, count in ledger.numbers.items():
            where = f" of pool {pool}" if pool else ""
            lines.append(f"distinct samples{where}: {count:,}, {ledger.waiting[pool]:,} waiting to be leased again")
    else:
        lines.append("no samples were leased: the islands read their own data")
    lines.append(f"tokens trained {ledger.trained:>16,}   (mean over the model)")
    for word in ("applied", "replaced", "lost", "open"):
        mean = _mean(ledger, word, sizes)
        share = f"{mean / ledger.trained:>7.2%}" if ledger.trained else ""
        lines.append(f"  {word:<12} {mean:>16,.0f} {share}")
    if ledger.incomplete:
        lines.append("records are missing from the tape, because the disk was full for too long")
    if ledger.recovered:
        lines.append("the tape was damaged and lost records: the numbers above are incomplete and cannot be checked")
        return "\n".join(lines)
    lines += [f"DOES NOT ADD UP: {what}" for what in ledger.discrepancies[:20]]
    if ledger.adds_up:
        lines.append("everything adds up")
    return "\n".join(lines)


def _short(session: str | None) -> str:
    return f"process {session[:8]}" if session else "nobody"


def _union(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _length(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _joined(spans: Iterable[tuple[int, int, str | None]]) -> list[tuple[int, int, str | None]]:
    found: list[tuple[int, int, str | None]] = []
    for start, stop, holder in sorted(spans, key=lambda span: span[0]):
        if found and found[-1][1] == start and found[-1][2] == holder:
            found[-1] = (found[-1][0], stop, holder)
        else:
            found.append((start, stop, holder))
    return found
