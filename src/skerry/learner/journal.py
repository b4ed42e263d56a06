"""The journal of an island: what replay needs to know about each step and cannot derive from elsewhere.

It lists what the island adopted and when, the run's token count each step saw, and the samples each step used. The journal
travels with contributions, so the tape can explain every merged contribution.

Entries are sent until the syncer has stored them, which a merge of this island's progress proves. They accumulate while the
syncer is away; beyond a limit they are dropped and the journal records a gap.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from skerry.core.leases.ranges import Range

MOST_ENTRIES, MOST_BYTES = 8000, 400_000
"""Limits on the entries kept, and on the size of the JSON sent."""


class Journal:
    """Journal entries that are not durable yet. Guarded by the session's lock."""

    def __init__(self) -> None:
        self._adopted: list[tuple[int, int, int, bool]] = []
        self._tokens: list[tuple[int, int]] = []
        self._data: list[tuple[int, list[list[object]]]] = []
        self._gaps: list[tuple[int, int]] = []
        self._from = 0
        """The journal covers everything after this many steps."""
        self._run_tokens = -1
        self._last: Range | None = None
        self._count = 0
        self._restored: dict[str, object] = {}

    def restored(self, source: str, origin: Sequence[tuple[str, int]], inherited: str) -> None:
        """Record where the optimizer state came from.

        `origin` has the session and its step count for each part; `inherited` is the journal that session had not handed over.
        """
        self._restored = {"source": source, "origin": list(origin), "inherited": json.loads(inherited or "null")}

    def adopted(self, steps: int, fragment: int, version: int, whole: bool = False) -> None:
        """Record an adoption. `whole` means that the version replaced the weights whatever the adoption rule."""
        self._adopted.append((steps, fragment, version, whole))

    def began_step(self, step: int, run_tokens: int) -> None:
        """Record the run's token count that this step's schedule sees. Steps count from 1."""
        if run_tokens != self._run_tokens:
            self._run_tokens = run_tokens
            self._tokens.append((step, run_tokens))
        if len(self._tokens) + len(self._adopted) + len(self._data) > MOST_ENTRIES:
            self._gaps.append((self._from, step))
            self.durable(step - 1)

    def trained_on(self, step: int, ranges: Sequence[Range]) -> None:
        """Record the samples of a step, unless they continue directly from the previous step."""
        if not ranges:
            return
        ranges = joined(ranges)
        last, count = self._last, sum(samples.count for samples in ranges)
        follows = last is not None and len(ranges) == 1 and (last.pool, last.stop) == (ranges[0].pool, ranges[0].start)
        if not follows or count != self._count:
            self._data.append((step, [[samples.pool, samples.start, samples.count] for samples in ranges]))
        self._last, self._count = ranges[-1], count

    def durable(self, steps: int) -> None:
        """Drop entries of the first `steps` steps, which the syncer has stored."""
        if steps > self._from:
            self._from = steps
            # An adoption between two steps has the number of the first, and may have come after the part that was stored.
            self._adopted = [entry for entry in self._adopted if entry[0] >= steps]
            self._tokens = [entry for entry in self._tokens if entry[0] > steps]
            self._data = [entry for entry in self._data if entry[0] > steps]

    def upto(self, steps: int) -> str:
        """The entries of the first `steps` steps that are not durable yet, as JSON. If they are too long, the journal that was
        inherited goes first, then all of them; the record then has a gap."""
        text = self._text(steps)
        if len(text) > MOST_BYTES and self._restored.get("inherited") is not None:
            self._restored["inherited"] = None
            text = self._text(steps)
        if len(text) > MOST_BYTES:
            self._gaps.append((self._from, steps))
            self._from = max(self._from, steps)
            self._adopted, self._tokens, self._data = (
                [entry for entry in self._adopted if entry[0] > steps],
                [entry for entry in self._tokens if entry[0] > steps],
                [entry for entry in self._data if entry[0] > steps],
            )
            text = self._text(steps)
        return text

    def _text(self, steps: int) -> str:
        entries = {
            "since": self._from,
            "until": steps,
            "adopted": [entry for entry in self._adopted if entry[0] <= steps],
            "tokens": [entry for entry in self._tokens if entry[0] <= steps],
            "data": [entry for entry in self._data if entry[0] <= steps],
            "gaps": self._gaps,
        }
        if self._from == 0:
            entries.update(self._restored)
        return json.dumps(entries, separators=(",", ":"))


def joined(ranges: Sequence[Range]) -> list[Range]:
    """The same samples with adjacent ranges combined."""
    combined: list[Range] = []
    for following in ranges:
        last = combined[-1] if combined else None
        if last is not None and (last.pool, last.stop) == (following.pool, following.start):
            combined[-1] = Range(last.pool, last.start, last.count + following.count)
        else:
            combined.append(following)
    return combined
