"""Immutable sets, maps and heaps; a new version costs in proportion to the change, not the size.

A version never changes: `adding`, `putting` and similar methods return the next one. The newest
version holds a plain dict and reads as fast. Each older version holds only the change to undo and
the version made from it. Laws:

- Every version always reads the same, whatever is made from it.
- A new version costs as much as its change if made from the newest one, else a whole copy.
- Finding a key in an older version takes a step per later version; counting or iterating copies it
  first.
- The first use of ranks sorts; afterwards, versions made from the newest one stay sorted.
- All versions are for one thread: to read one may change another. A copy (`apart`) belongs to
  whoever it is given to.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

_ABSENT: Any = object()


class PersistentMap(Mapping[K, V], Generic[K, V]):
    """A mapping whose versions never change. All are for one thread."""

    __slots__ = ("_items", "_next", "_ranked", "_undo")

    _next: PersistentMap[K, V]
    """Made from this version. Absent, as `_undo` is, where this one has all items itself."""
    _undo: dict[K, V]

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        self._items: dict[K, V] | None = dict(items)
        self._ranked: list[Any] | None = None
        """All keys in ascending order, if this is the newest version and ranks are in use."""

    def putting(self, key: K, value: V) -> PersistentMap[K, V]:
        """Return this map with one value set."""
        return self._changed({key: value})

    def merging(self, changes: Mapping[K, V]) -> PersistentMap[K, V]:
        """Return this map with all of these values set."""
        return self._changed(changes) if changes else self

    def dropping(self, key: K) -> PersistentMap[K, V]:
        """Return this map without a key."""
        return self if key not in self else self._changed({key: _ABSENT})

    def apart(self) -> PersistentMap[K, V]:
        """Return a copy that shares nothing with this map, for another thread."""
        return PersistentMap(self._whole())

    def keys_at(self, ranks: Iterable[int]) -> list[K]:
        """Return the keys of these ranks in ascending order of keys, from 0."""
        if self._ranked is None:
            self._ranked = sorted(self._whole())
        return [self._ranked[rank] for rank in ranks]

    def __getitem__(self, key: K) -> V:
        value: V = self._find(key)
        if value is _ABSENT:
            raise KeyError(key)
        return value

    # Most reads are of the newest version, which has a dict of its own.

    def get(self, key: K, default: Any = None) -> Any:
        """Return the value of a key, or the default."""
        if self._items is not None:
            return self._items.get(key, default)
        value = self._find(key)
        return default if value is _ABSENT else value

    def __contains__(self, key: object) -> bool:
        if self._items is not None:
            return key in self._items
        return self._find(key) is not _ABSENT

    def __iter__(self) -> Iterator[K]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole() if self._items is None else self._items)

    def __eq__(self, other: object) -> bool:
        return self is other or Mapping.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PersistentMap({self._whole()!r})"

    def _find(self, key: Any) -> Any:
        version = self
        while version._items is None:
            if key in version._undo:
                return version._undo[key]
            version = version._next
        return version._items.get(key, _ABSENT)

    def _changed(self, changes: Mapping[K, V]) -> PersistentMap[K, V]:
        items = self._whole()
        made: PersistentMap[K, V] = PersistentMap.__new__(PersistentMap)
        made._items = items
        self._undo = {key: items.get(key, _ABSENT) for key in changes}
        self._items, self._next = None, made
        _apply(items, changes)
        made._ranked, self._ranked = self._ranked, None
        if made._ranked is not None:
            _rank(made._ranked, self._undo, items)
        return made

    def _whole(self) -> dict[K, V]:
        """Return this version's own dict; an older version makes a copy first."""
        if self._items is None:
            undone, version = [], self
            while version._items is None:
                undone.append(version._undo)
                version = version._next
            self._items = dict(version._items)
            for undo in reversed(undone):
                _apply(self._items, undo)
            del self._undo, self._next
        return self._items


def as_persistent(items: Mapping[K, V]) -> PersistentMap[K, V]:
    """Return a mapping as a persistent one, without a copy if it is one."""
    return items if isinstance(items, PersistentMap) else PersistentMap(items)


def _apply(items: dict[K, V], changes: Mapping[K, V]) -> None:
    for key, value in changes.items():
        if value is _ABSENT:
            items.pop(key, None)
        else:
            items[key] = value


def _rank(ranked: list[Any], before: Mapping[K, V], items: Mapping[K, V]) -> None:
    """Insert and remove the changed keys; `before` has their values before the change."""
    for key, value in before.items():
        if (value is _ABSENT) == (key in items):
            if key in items:
                insort(ranked, key)
            else:
                del ranked[bisect_left(ranked, key)]


class PersistentSet(Set[T], Generic[T]):
    """A set whose versions never change. All are for one thread."""

    __slots__ = ("_members",)

    def __init__(self, members: Iterable[T] = ()) -> None:
        self._members: PersistentMap[T, None] = PersistentMap((each, None) for each in members)

    def adding(self, member: T) -> PersistentSet[T]:
        """Return this set with one more member."""
        return self if member in self else self._with(self._members.putting(member, None))

    def dropping(self, member: T) -> PersistentSet[T]:
        """Return this set without a member."""
        return self._with(self._members.dropping(member)) if member in self else self

    def at(self, ranks: Iterable[int]) -> list[T]:
        """Return the members of these ranks in ascending order, from 0."""
        return self._members.keys_at(ranks)

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def __iter__(self) -> Iterator[T]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __eq__(self, other: object) -> bool:
        return self is other or Set.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PersistentSet({list(self)!r})"

    def _with(self, members: PersistentMap[T, None]) -> PersistentSet[T]:
        made: PersistentSet[T] = PersistentSet.__new__(PersistentSet)
        made._members = members
        return made


@dataclass(frozen=True, slots=True)
class Heap(Generic[T]):
    """A leftist heap: `first` is the smallest item; two smaller heaps hold the rest."""

    first: T
    left: Heap[T] | None = None
    right: Heap[T] | None = None
    rank: int = 1
    """Number of heaps along `right`, including this one; no path down is shorter."""

    def rest(self) -> Heap[T] | None:
        """Return all items but the first; None if there are none."""
        return merged(self.left, self.right)


def merged(one: Heap[T] | None, other: Heap[T] | None) -> Heap[T] | None:
    """Merge two heaps. The number of steps grows as the logarithm of their sizes."""
    if one is None or other is None:
        return other if one is None else one
    if other.first < one.first:  # type: ignore[operator]
        one, other = other, one
    left, right = one.left, merged(one.right, other)
    ranks = [0 if each is None else each.rank for each in (left, right)]
    if ranks[0] < ranks[1]:
        left, right = right, left
    return Heap(one.first, left, right, min(ranks) + 1)
