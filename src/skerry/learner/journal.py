"""What an island did, step by step, as far as it cannot be worked out otherwise: what it adopted and when, which place in the
schedule it saw, and which samples it took. It travels with contributions, so the tape can explain every one it merged.

Entries are sent until the syncer has made them durable, which a merge of this island's progress shows. While it is away for
long they pile up; beyond a limit they are dropped, and the record says that there is a gap.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from skerry.core.leases.ranges import Range

MOST_ENTRIES, MOST_BYTES = 8000, 400_000
"""Kept and sent at a time."""


class Journal:
    """Guarded by the link's lock."""

    def __init__(self) -> None:
        self._adopted: list[tuple[int, int, int, bool]] = []
        self._tokens: list[tuple[int, int]] = []
        self._data: list[tuple[int, list[list[object]]]] = []
        self._gaps: list[tuple[int, int]] = []
        self._from = 0
        """What happened after this many steps is here."""
        self._run_tokens = -1
        self._last: Range | None = None
        self._count = 0
        self._restored: dict[str, object] = {}

    def restored(self, source: str, origin: Sequence[tuple[str, int]], inherited: str) -> None:
        """The optimizer did not begin fresh: where its state is from, of which process after how many steps, and what that
        process had not been able to hand over of its own journal."""
        self._restored = {"source": source, "origin": list(origin), "inherited": json.loads(inherited or "null")}

    def adopted(self, steps: int, fragment: int, version: int, whole: bool = False) -> None:
        """`whole`: as it is, whatever the rule of adoption."""
        self._adopted.append((steps, fragment, version, whole))

    def began_step(self, step: int, run_tokens: int) -> None:
        """Tokens of the run that the schedule of this step follows; steps are counted from 1."""
        if run_tokens != self._run_tokens:
            self._run_tokens = run_tokens
            self._tokens.append((step, run_tokens))
        if len(self._tokens) + len(self._adopted) + len(self._data) > MOST_ENTRIES:
            self._gaps.append((self._from, step))
            self.durable(step - 1)

    def trained_on(self, step: int, ranges: Sequence[Range]) -> None:
        """Written down only if it does not follow on what the step before took."""
        if not ranges:
            return
        ranges = joined(ranges)
        last, count = self._last, sum(found.count for found in ranges)
        follows = last is not None and len(ranges) == 1 and (last.pool, last.stop) == (ranges[0].pool, ranges[0].start)
        if not follows or count != self._count:
            self._data.append((step, [[found.pool, found.start, found.count] for found in ranges]))
        self._last, self._count = ranges[-1], count

    def durable(self, steps: int) -> None:
        """The syncer has written down what happened up to this many steps."""
        if steps > self._from:
            self._from = steps
            # An adoption between two steps has the number of the first; it may come after what was made durable there.
            self._adopted = [entry for entry in self._adopted if entry[0] >= steps]
            self._tokens = [entry for entry in self._tokens if entry[0] > steps]
            self._data = [entry for entry in self._data if entry[0] > steps]

    def upto(self, steps: int) -> str:
        """Entries of the first `steps` steps that are not durable yet."""
        found = {
            "since": self._from,
            "until": steps,
            "adopted": [entry for entry in self._adopted if entry[0] <= steps],
            "tokens": [entry for entry in self._tokens if entry[0] <= steps],
            "data": [entry for entry in self._data if entry[0] <= steps],
            "gaps": self._gaps,
        }
        if self._from == 0:
            found.update(self._restored)
        text = json.dumps(found, separators=(",", ":"))
        if len(text) <= MOST_BYTES:
            return text
        self._gaps.append((self._from, steps))
        self.durable(steps)
        return self.upto(steps)


def joined(ranges: Sequence[Range]) -> list[Range]:
    """With those that touch in one."""
    found: list[Range] = []
    for following in ranges:
        last = found[-1] if found else None
        if last is not None and (last.pool, last.stop) == (following.pool, following.start):
            found[-1] = Range(last.pool, last.start, last.count + following.count)
        else:
            found.append(following)
    return found
