"""Extension points: things that a setting chooses by name, and that code outside this package can add.

Each point has one Registry beside the code it extends. A module that registers something is a plugin. Plugins are imported
lazily, the first time a name is looked up that is not registered yet, so a run without them pays nothing for them. Skerry finds
them in two ways: modules named in SKERRY_PLUGINS (separated by commas), and entry points of the group `skerry.plugins`.

Every process of a run looks its own names up, so each needs the plugin. Processes that `skerry train` starts inherit the
environment; on other machines the plugin has to be installed or named there.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from skerry.errors import ConfigError

ENVIRONMENT = "SKERRY_PLUGINS"
GROUP = "skerry.plugins"

T = TypeVar("T")
Registered = TypeVar("Registered")


class Registry(Generic[T]):
    """Names and what they stand for, at one extension point."""

    def __init__(self, what: str) -> None:
        """`what` is the point's name in error messages: "codec"."""
        self.what = what
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Class or function decorator: register what follows under this name. A name can be taken only once."""

        def decorate(entry: Registered) -> Registered:
            self.add(name, entry)  # type: ignore[arg-type]  # the decorated class keeps its own type
            return entry

        return decorate

    def add(self, name: str, entry: T) -> None:
        if name in self._entries:
            raise ConfigError(f"{self.what} {name!r} is registered twice; give one of them another name")
        self._entries[name] = entry

    def names(self) -> list[str]:
        """Names known at present. Plugins that were not needed yet are not imported for this."""
        return list(self._entries)

    def get(self, name: str, setting: str = "", run: str = "") -> T:
        """What is registered under a name. `setting` is where the name stands and `run` which run needs it, for the error.

        Raises ConfigError if nothing is, or if a plugin cannot be imported.
        """
        if name not in self._entries:
            _plugins.load()
        if name not in self._entries:
            known = ", ".join(self._entries) or "(none here)"
            close = difflib.get_close_matches(name, self._entries, 1, cutoff=0.75)
            hint = f"Did you mean {close[0]!r}? " if close else ""
            raise ConfigError(
                f"{f'{run}: ' if run else ''}{setting or self.what} must be one of {known}, got {name!r}. {hint}"
                f"If this {self.what} comes from a plugin, install it on this machine, or name its module in {ENVIRONMENT}"
            )
        return self._entries[name]


class _Plugins:
    """Imports the plugins of this process, once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._begun = False
        self._failure: str | None = None

    def load(self) -> None:
        with self._lock:
            if not self._begun:
                self._begun = True  # first: a plugin may look names up while it is imported
                self._import_all()
            if self._failure is not None:
                raise ConfigError(self._failure)

    def _import_all(self) -> None:
        named = [module.strip() for module in os.environ.get(ENVIRONMENT, "").split(",") if module.strip()]
        entries = importlib.metadata.entry_points(group=GROUP)
        sources: list[tuple[str, str, Callable[[], object]]] = [
            *((module, ENVIRONMENT, partial(importlib.import_module, module)) for module in named),
            *((entry.value, f"entry point {entry.name!r}", entry.load) for entry in entries),
        ]
        for module, source, load in sources:
            try:
                load()
            except Exception as error:  # a plugin may fail in any way
                why = " ".join(str(error).split()) or "no reason given"
                if isinstance(error, ModuleNotFoundError) and error.name == module:
                    why += "; put its folder on PYTHONPATH"
                self._failure = f"plugin {module} ({source}) cannot be imported: {type(error).__name__}: {why}"
                return


_plugins = _Plugins()
