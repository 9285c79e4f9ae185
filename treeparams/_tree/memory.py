"""Memories that keep no object alive, and that do not grow without limit."""

import collections
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class Recent(collections.OrderedDict[Hashable, None]):
    """A set of numbers and texts that forgets the oldest, once there are more than a program of many models notes."""

    most = 65536

    def note(self, keys: Iterable[Hashable]) -> None:
        """Adds keys."""
        self.update(dict.fromkeys(keys))
        while len(self) > self.most:
            self.popitem(last=False)


def with_object(function: Callable[..., T]) -> Callable[..., T]:
    """Remembers the answer of a function about an object, such as a class, as long as that lives.

    `functools.cache` would keep it alive. The function may have further arguments; it is asked again if they differ
    from the last ones. The answer must not hold the object.
    """
    known: dict[int, tuple[Any, T, object]] = {}  # by identity: a `WeakKeyDictionary` takes twice the time

    @functools.wraps(function)
    def remembering(given: Any, *args: Hashable) -> T:
        key = id(given)
        found = known.get(key)
        if found is None or found[0] != args:
            at_its_end = weakref.ref(given, lambda _: known.pop(key, None))
            found = known[key] = args, function(given, *args), at_its_end
        return found[1]

    return remembering
