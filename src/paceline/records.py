"""Data classes as plain values that JSON can hold, and back by their annotations."""

import base64
import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[Any], Any]


def plain(value: Any, without: tuple[str, ...] = ()) -> Any:
    """Returns a value with every data class in it as a dictionary; `without` names fields to leave out."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.name not in without}
    if isinstance(value, Mapping):
        return {key: plain(own) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(own) for own in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def parse(kind: Callable[..., T], record: Mapping[str, Any], **given: Any) -> T:
    """Returns the `kind` that `plain` made a record of; `given` fields are taken as they are."""
    readers = _readers(kind)
    return kind(**{name: readers[name](value) for name, value in record.items()}, **given)


@functools.cache
def _readers(kind: Any) -> dict[str, Reader]:
    hints = get_type_hints(kind)
    return {f.name: _reader(hints[f.name]) for f in fields(kind)}


def _as_it_is(value: Any) -> Any:
    return value


def _reader(kind: Any) -> Reader:
    """Returns what makes a value of this annotation of a plain one."""
    origin, own = get_origin(kind), [each for each in get_args(kind) if each not in (NoneType, Ellipsis)]
    if isinstance(kind, type) and is_dataclass(kind):
        return functools.partial(parse, kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if kind is bytes:
        return base64.b64decode
    if origin in (UnionType, Union) and len(own) == 1:
        read = _reader(own[0])
        return lambda value: None if value is None else read(value)
    if origin is dict:
        key, entry = (int if own[0] is int else _as_it_is), _reader(own[1])
        return lambda value: {key(name): entry(each) for name, each in value.items()}
    if origin in (list, tuple):
        entries = [_reader(each) for each in own]
        if len(own) > 1:  # of fixed length
            return lambda value: tuple(read(each) for read, each in zip(entries, value, strict=True))
        return lambda value: origin(value if entries[0] is _as_it_is else map(entries[0], value))
    return _as_it_is
