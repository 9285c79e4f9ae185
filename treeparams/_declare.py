"""What a class says of its fields: which are trained, which always hold one and the same array.

A declaration belongs to a class, never to an instance, and comes from two places: the metadata of a dataclass field
(`field`, for classes one writes) and the registry below (`declare`, for classes one does not own).
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx

from ._paths import nearest, quote, selects, split


class Declared(NamedTuple):
    """All that is declared of one class, bases included; paths are relative to an instance."""

    fields: dict[str, bool]  # what the fields' metadata say, where they say anything
    frozen: tuple[str, ...]  # globs
    ties: dict[str, Any]  # {alias: path or (path, transform)}


# Classes known without importing their packages: what their authors hold fixed is fixed here too.
_BY_NAME = {
    "equinox.StateIndex": ("init",),  # running statistics, before `eqx.nn.make_with_state` moves them ...
    "equinox.State": ("**",),  # ... to here
    "flax.BatchStat": ("**",),
    "paramax.NonTrainable": ("tree",),
}

_registry: "weakref.WeakKeyDictionary[type, Declared]" = weakref.WeakKeyDictionary()
_declarations = 0


def field(*, trainable: bool | None = None, **kwargs: Any) -> Any:
    """`equinox.field` that also says whether what it holds is trained.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> class Scale(eqx.Module):
    ...     weight: jax.Array
    ...     mean: jax.Array = tp.field(trainable=False)
    >>> tp.layout(Scale(jnp.ones(3), jnp.zeros(3))).paths
    ('weight',)

    The declaration is kept in the field's metadata, so it goes with `converter=`, `static=`, defaults and inheritance
    (a subclass that defines the field anew decides anew). A plain dataclass that is a pytree says the same with
    `dataclasses.field(metadata={"trainable": False})`.

    Args:
        trainable: `False` freezes every parameter at or below the field; a `True` further down does not thaw it.
            `True` is a promise: when the field's own value is a leaf that cannot be trained (a Python float, an int
            array), `tp.layout` raises a `TypeError`. `None`, the default, says nothing: parameters are trained.
        **kwargs: as for `equinox.field`.

    Returns:
        A dataclass field.

    Raises:
        TypeError: `trainable` is not a bool.
        ValueError: `trainable=True` on a static field, which holds no leaves.
    """
    if trainable is not None:
        _check_bool(trainable, "tp.field")
        if trainable and kwargs.get("static"):
            raise ValueError(
                "a static field is no part of the tree and cannot be trained: drop `static=True` or `trainable=True`"
            )
        kwargs["metadata"] = {**kwargs.get("metadata", {}), "trainable": trainable}
    return eqx.field(**kwargs)


def declare(
    cls: type,
    *,
    frozen: str | Sequence[str] = (),
    ties: Mapping[str, str | tuple[str, Callable[[Any], Any]]] | None = None,
) -> None:
    """Says of a class which of its parts are frozen and which are tied in every instance.

    For classes one does not own, and for the ties of one's own; what is frozen in one's own class, `tp.field` says.

    >>> import equinox as eqx, jax, treeparams as tp
    >>> class Norm(eqx.nn.LayerNorm):  # stands for a class of another package
    ...     pass
    >>> tp.declare(Norm, frozen="bias")
    >>> tp.layout(Norm(4)).paths
    ('weight',)

    Subclasses inherit the declaration. Declaring a class again replaces what was declared of it before. Programs that
    plain `jax.jit` has compiled do not notice; declare before the first call.

    Args:
        cls: the class of a pytree node.
        frozen: globs over paths relative to an instance; all below what they match is frozen.
        ties: `{alias: path}` or `{alias: (path, transform)}`, paths relative to an instance; as for `tp.layout`.

    Raises:
        TypeError: `cls` is not a class.
        ValueError: the class is a dataclass or NamedTuple and has no such field.
    """
    global _declarations
    if not isinstance(cls, type):
        raise TypeError(f"tp.declare takes a class, got {cls!r}; for one model write tp.layout(model, freeze=...)")
    frozen = (frozen,) if isinstance(frozen, str) else tuple(frozen)
    ties = dict(ties or {})
    sources = [source if isinstance(source, str) else source[0] for source in ties.values()]
    _check_fields(cls, (*frozen, *ties, *sources))
    _registry[cls] = Declared({}, frozen, ties)
    _declarations += 1


def declared(cls: type) -> Declared:
    """The declarations of a class and its bases."""
    return _declared(cls, _declarations)


@functools.lru_cache(maxsize=1024)
def _declared(cls: type, _: int) -> Declared:
    fields: dict[str, bool] = {}
    if dataclasses.is_dataclass(cls):
        for each in dataclasses.fields(cls):
            if "trainable" in each.metadata:
                _check_bool(each.metadata["trainable"], f"{cls.__qualname__}.{each.name}")
                fields[each.name] = each.metadata["trainable"]
    frozen: list[str] = []
    ties: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        frozen += _BY_NAME.get(f"{base.__module__.partition('.')[0]}.{base.__qualname__}", ())
        if base in _registry:
            frozen += _registry[base].frozen
            ties |= _registry[base].ties
    return Declared(fields, tuple(frozen), ties)


def declarations() -> int:
    """How many times `declare` has been called: what was derived from the registry before is stale after."""
    return _declarations


def is_box(cls: type) -> bool:
    """Whether a node of this class only wraps one value, so that it adds no entry to a path (`flax.nnx.Variable`)."""
    return any(
        base.__module__.startswith("flax.nnx") and base.__name__ in ("Variable", "VariableState")
        for base in cls.__mro__
    )


def _check_bool(value: object, where: str) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{where}: `trainable` must be True or False, got {value!r}")


def _check_fields(cls: type, paths: Sequence[str]) -> None:
    names = getattr(cls, "_fields", ())  # of a NamedTuple
    if dataclasses.is_dataclass(cls):
        names = [each.name for each in dataclasses.fields(cls)]
    if not names:
        return
    for path in paths:
        first = split(path)[:1]
        if not any(first and selects(first, (quote(name),)) for name in names):
            raise ValueError(f"{cls.__qualname__} has no field for {path!r}{nearest(path, names)}")
