"""Fields of an object that anybody may have written: each is checked, none is believed.

Every function raises ValueError, which says in few words what is wrong with which field.
"""

import re
from typing import Any, TypeAlias

Fields: TypeAlias = dict[str, Any]
LARGEST = (1 << 63) - 1  # etcd's own numbers have 63 bits
LONGEST = 1 << 16  # characters of a text

_LEASE = re.compile(r"[0-9a-f]{1,16}")
_DECIMAL = re.compile(r"[0-9]{1,18}")


def number(fields: Fields, name: str, least: int = 0, most: int = LARGEST) -> int:
    """A whole number of these bounds."""
    value = _present(fields, name)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is no number from {least} to {most}")
    return value


def text(fields: Fields, name: str) -> str:
    """A text of at most LONGEST characters."""
    value = _present(fields, name)
    if type(value) is not str or len(value) > LONGEST:
        raise ValueError(f"{name} is no text of at most {LONGEST} characters")
    return value


def flag(fields: Fields, name: str) -> bool:
    """True or false."""
    value = _present(fields, name)
    if type(value) is not bool:
        raise ValueError(f"{name} is neither true nor false")
    return value


def seconds(fields: Fields, name: str) -> float:
    """A number, which may have a fraction."""
    value = _present(fields, name)
    if type(value) not in (int, float) or not 0 <= value < 1e12:
        raise ValueError(f"{name} is no number of seconds")
    return float(value)


def items(fields: Fields, name: str) -> list[Any]:
    """A list, of whatever."""
    value = _present(fields, name)
    if type(value) is not list:
        raise ValueError(f"{name} is no list")
    return value


def objects(fields: Fields, name: str) -> list[Fields]:
    """A list of objects."""
    found = items(fields, name)
    if any(type(item) is not dict for item in found):
        raise ValueError(f"{name} is no list of objects")
    return found


def inner(fields: Fields, name: str) -> Fields | None:
    """An object, or None for null."""
    value = _present(fields, name)
    if value is not None and type(value) is not dict:
        raise ValueError(f"{name} is no object")
    return value


def lease(value: Any) -> int:
    """A lease id as `keys.hexed` writes it."""
    if type(value) is not str or not _LEASE.fullmatch(value):
        raise ValueError("a lease is no hexadecimal number")
    found = int(value, 16)
    if not 0 < found <= LARGEST:
        raise ValueError("a lease is out of range")
    return found


def decimal(value: str) -> int | None:
    """A number in a key's name; None for what this program does not write."""
    return int(value) if _DECIMAL.fullmatch(value) else None


def _present(fields: Fields, name: str) -> Any:
    try:
        return fields[name]
    except KeyError:
        raise ValueError(f"{name} is missing") from None
