"""Format a run as text: numbers, progress lines and the summary at the end.

No function returns control characters, whatever the records contain. Colours and layout belong to the view.
"""

from __future__ import annotations

from skerry.observe.accounting import RunAccount
from skerry.observe.status import Event, RunStatus, ValidationPoint

LOSSES_LISTED = 8
"""With more islands than this a progress line shows the range of losses instead of each one."""
_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def tokens_of(tokens: int, budget_tokens: int) -> str:
    """`0.77M/2.50M`, both in the unit of the larger; without a budget `0.77M`."""
    largest = max(tokens, budget_tokens)
    size, unit = next(((size, unit) for size, unit in _SCALES if largest >= size), (1.0, ""))
    digits = 2 if unit else 0
    done = f"{tokens / size:.{digits}f}{unit}"
    return f"{done}/{budget_tokens / size:.{digits}f}{unit}" if budget_tokens > 0 else done


def rate(per_s: float | None) -> str:
    """`17.9k`, `812`, or a dash."""
    if per_s is None:
        return "-"
    for size, unit in _SCALES:
        if per_s >= 0.99995 * size:
            return f"{per_s / size:.1f}{unit}"
    return f"{per_s:.0f}"


def size(size_bytes: float) -> str:
    """`1.2 MB`, in powers of ten."""
    if size_bytes < 1000:
        return f"{size_bytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        size_bytes /= 1000
        if size_bytes < 999.95:
            return f"{size_bytes:.1f} {unit}"
    return f"{size_bytes / 1000:.1f} PB"


def duration(seconds: float) -> str:
    """`42s`, `3m 02s`, `1h 05m`, `2d 03h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def percent(share: float) -> str:
    """Rounded, but 100% only if the share is 1."""
    return f"{min(round(share * 100), 99 if share < 1 else 100)}%"


def loss(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def one_line(text: str) -> str:
    """Replace line breaks and control characters by spaces: a record must not control the terminal."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def describe(event: Event) -> str:
    """`island-2 killed: signal 9`."""
    words = one_line(f"{event.island} {event.what}")
    detail = one_line(event.detail)
    return f"{words}: {detail}" if detail else words


def describe_validation(point: ValidationPoint) -> str:
    found = "is not finite" if point.loss is None else f"{point.loss:.4f}"
    return f"validation loss {found} at {tokens_of(point.tokens, 0)} tokens, step {point.step}"


def stamp(elapsed_s: float) -> str:
    return f"[{int(elapsed_s):>4}s]"


def progress_line(status: RunStatus) -> str:
    """One log line: progress, speed, losses and participation."""
    parts = [one_line(status.phase)] if status.phase not in ("", "running") else []
    if status.progress is not None:
        parts.append(f"{percent(status.progress):>3}")
    parts.append(f"{tokens_of(status.tokens, status.budget_tokens)} tokens")
    if status.tokens_per_s is not None and status.phase != "ended":
        parts.append(f"{rate(status.tokens_per_s)} tok/s")
    if status.latest_validation is not None:
        parts.append(f"val {loss(status.latest_validation.loss)}")
    if status.live is not None:
        parts.append(f"{status.live}/{max(status.live, status.expected or 0)} islands")
    if status.merges:
        parts.append(f"{status.merges} merges")
        if status.recent_participation is not None:
            parts.append(f"{percent(status.recent_participation)} took part")
    losses = [island.loss for island in status.sorted_islands() if island.working and island.loss is not None]
    if len(losses) > LOSSES_LISTED:
        parts.append(f"loss {min(losses):.2f} to {max(losses):.2f}, mean {sum(losses) / len(losses):.2f}")
    elif losses:
        parts.append("loss " + " ".join(map(loss, losses)))
    return f"{stamp(status.elapsed_s)} " + "  ".join(parts)


def summary(status: RunStatus) -> str:
    """The results of a run, for the end of its output."""
    result = status.result
    if result is None:
        last = status.latest_validation
        found = f"none at the end; last {loss(last.loss, 4)}" if last else "none"
        tokens, seconds, sample = status.tokens, status.elapsed_s, ""
    else:
        found = loss(result.validation_loss, 4)
        if result.standard_error is not None:
            found += f" ± {result.standard_error:.4f}"
        tokens, seconds, sample = result.tokens, result.seconds, result.sample
    pace = f" ({rate(tokens / seconds)} tok/s)" if seconds > 0 else ""
    merges = str(status.merges)
    if status.merges and status.participation is not None:
        merges += f", {status.participation:.1%} of the asked islands took part"
    lines = [
        f"validation loss  {found}",
        f"tokens           {tokens_of(tokens, 0)}",
        f"time             {duration(seconds)}{pace}",
        f"merges           {merges}",
        f"restarts         {_restarts(status)}",
        f"traffic          {size(status.sent_bytes)} sent by islands, {size(status.received_bytes)} received",
    ]
    if sample:
        lines += ["sample", *(f"  {_readable(line)}".rstrip() for line in sample.splitlines())]
    return "\n".join(lines)


def link_lines(status: RunStatus) -> str:
    """Traffic and waiting time of each island's link."""
    islands = [island for island in status.sorted_islands() if island.link.known]
    if not islands:
        return ""
    shares = [share for island in islands if (share := island.link.waited_share) is not None]
    lines = [f"links            islands waited for them at most {_percent(max(shares, default=None))} of their time"]
    for island in islands:
        link = island.link
        latency = f"round trip {milliseconds(link.round_trip_s)}"
        speed = f"{size(link.send_bytes_per_s or 0)}/s up, {size(link.receive_bytes_per_s or 0)}/s down"
        queued = f"queued {milliseconds(link.queue_s or 0)}"
        state = link.total("state_sent") + link.total("state_received")
        control = link.total("control_sent") + link.total("control_received")
        carried = [f"{size(link.total('contributions'))} contributions", f"{size(link.total('versions'))} versions"]
        carried += [f"{size(state)} optimizer state"] if state else []
        lines.append(f"  {island.name:<14} {latency}; {speed}; {queued}; {', '.join(carried)}, {size(control)} control")
    return "\n".join(lines)


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def account_lines(account: RunAccount) -> str:
    """The account of the islands' time. docs/operate.md defines the terms."""
    if not account.islands:
        return ""
    lines = [
        f"goodput          {_percent(account.goodput)} of allocated island time, {_percent(account.goodput_alive)} while alive",
        f"uptime           {_percent(account.uptime)}; longest pause of all islands {account.longest_pause_s:.1f} s",
        f"merged alone     {account.merges_alone} of {account.merges} merges; on average {account.merged_share:.1%} took part",
    ]
    for island in account.islands.values():
        stall = f"stall {island.longest_stall_s:.2f} s"
        if island.step_time_s:
            stall += f" ({island.longest_stall_s / island.step_time_s:.1f} steps)"
        deaths = f", {island.deaths} deaths" if island.deaths else ""
        useful = _percent(island.useful_s / island.allocated_s if island.allocated_s else None)
        wasted = f"stalled {island.stalled_s:.1f} s, lost {island.lost_s:.1f} s"
        lines.append(f"  {island.name:<14} useful {useful}, {wasted}, longest {stall}{deaths}")
    back = [recovery.seconds for recovery in account.recoveries if recovery.seconds is not None]
    if account.recoveries:
        longest = f", at most {max(back):.1f} s until the next merge" if back else ""
        rejoined = [r.seconds - r.joined_after_s for r in account.recoveries if r.seconds and r.joined_after_s]
        after = f", at most {max(rejoined):.1f} s after joining again" if rejoined else ""
        lines.append(f"recoveries       {len(back)} of {len(account.recoveries)} injuries{longest}{after}")
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _restarts(status: RunStatus) -> str:
    islands, syncer = status.island_restarts, status.syncer_restarts
    if not islands and not syncer:
        return "none"
    parts = [f"{islands} of islands"] if islands else []
    parts += [f"{syncer} of the syncer"] if syncer else []
    return f"{islands + syncer} ({', '.join(parts)})" if len(parts) > 1 else parts[0]


def _readable(line: str) -> str:
    """A line of model output: indentation kept, unprintable characters replaced."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line.expandtabs(4))
