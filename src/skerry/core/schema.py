"""Tape records to JSON and back. A record is a frozen dataclass; its kind is the class name in snake case."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, ClassVar

KINDS: dict[str, type[TapeRecord]] = {}
"""Every kind of record, by its name on the tape."""


class MalformedRecord(Exception):
    """The data does not fit any record class."""


@dataclass(frozen=True)
class TapeRecord:
    """A decision or an observation that the syncer writes to the tape. Subclasses register themselves by kind."""

    kind: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        KINDS[cls.kind] = cls

    def to_json(self) -> dict[str, Any]:
        return {name: _plain(value) for name, value in vars(self).items() if value is not None}


def read_record(kind: str, data: Any) -> TapeRecord:
    """Build a record from its JSON data. Raises MalformedRecord."""
    if kind not in KINDS:
        raise MalformedRecord(f"unknown record kind {kind!r}")
    record: TapeRecord = _build(KINDS[kind], data)
    return record


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {name: _plain(item) for name, item in vars(value).items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _build(cls: type[Any], data: Any) -> Any:
    if not isinstance(data, dict):
        raise MalformedRecord(f"{cls.__name__} must be an object, got {data!r}")
    hints = typing.get_type_hints(cls)
    if unknown := data.keys() - hints.keys():
        raise MalformedRecord(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")
    try:
        return cls(**{name: _typed(hints[name], value) for name, value in data.items()})
    except (TypeError, ValueError) as error:
        raise MalformedRecord(f"{cls.__name__}: {error}") from None


def _typed(hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _typed(next(a for a in arguments if a is not type(None)), value)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is ...:
            return tuple(_typed(arguments[0], item) for item in value)
        return tuple(_typed(of, item) for of, item in zip(arguments, value, strict=True))
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type[Any], hint), value)
    return value
