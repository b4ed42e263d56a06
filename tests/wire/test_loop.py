"""The event loop for all that is said to syncers: it lets go of the interpreter seldom, and starves nobody."""

from __future__ import annotations

import asyncio
import selectors
import threading

from skerry.wire.loop import POLLS_SKIPPED, CalmSelector, run_here, shared_loop


def test_a_chain_of_callbacks_runs_without_looking_for_news(monkeypatch) -> None:
    looks = 0
    look = selectors.DefaultSelector.select

    def counted(self: selectors.BaseSelector, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        nonlocal looks
        looks += 1
        return look(self, timeout)

    monkeypatch.setattr(selectors.DefaultSelector, "select", counted)

    async def chain() -> int:
        await asyncio.sleep(0.001)
        before = looks
        for _ in range(POLLS_SKIPPED - 2):
            await asyncio.sleep(0)
        return looks - before

    loop = asyncio.SelectorEventLoop(CalmSelector())
    try:
        assert loop.run_until_complete(chain()) == 0
    finally:
        loop.close()


def test_callbacks_without_end_do_not_keep_others_from_being_heard() -> None:
    heard = threading.Event()
    loop = shared_loop()

    async def busy() -> int:
        """Never lets the loop rest until another thread has got a word in."""
        rounds = 0
        while not heard.is_set():
            await asyncio.sleep(0)
            rounds += 1
        return rounds

    speaker = threading.Timer(0.05, loop.call_soon_threadsafe, [heard.set])
    speaker.start()
    try:
        assert run_here(asyncio.wait_for(busy(), 30)) > 0
    finally:
        speaker.join()


def test_timers_fire_while_callbacks_go_on() -> None:
    async def busy() -> None:
        fired = asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, fired.set)
        while not fired.is_set():
            await asyncio.sleep(0)

    run_here(asyncio.wait_for(busy(), 30))
