"""A learner's side of the exchange, for tests that script what it hears."""

from __future__ import annotations

from typing import Any

from skerry.config import SyncConfig
from skerry.core.exchange import Exchange, Give, Mark, Question, Version


def version(number: int, fragment: int = 0, step: int = 0, counted: int = 0) -> Version:
    return Version(fragment, number, step, counted)


def question(step: int, fragment: int = 0, min_base: int = 0) -> Question:
    return Question(fragment, step, min_base)


def take(exchange: Exchange, new: Version) -> Mark:
    """Announce, fetch and adopt; from where on progress counts then."""
    exchange.announced(new)
    assert new in exchange.to_fetch()
    assert exchange.fetched(new)
    assert new in exchange.adoptable()
    exchange.adopted(new)
    return exchange.held[new.fragment].since


def give(exchange: Exchange) -> Give:
    [answer] = exchange.answers()
    assert isinstance(answer, Give)
    exchange.given(answer)
    return answer


def training(fragments: int = 1, step: int = 0, **settings: Any) -> Exchange:
    """An exchange that has joined, holds version 0 of everything and has begun."""
    settings.setdefault("every", 8)
    exchange = Exchange(SyncConfig(fragments=fragments, **settings), fragments)
    exchange.welcomed((0,) * fragments, (0,) * fragments, (0,) * fragments, step)
    for first in exchange.to_fetch():
        assert exchange.fetched(first)
        exchange.adopted(first)
    exchange.begin(step)
    return exchange


def steps(exchange: Exchange, count: int, tokens: int = 10) -> list[int]:
    return [fragment for _ in range(count) for fragment in exchange.stepped(tokens)]
