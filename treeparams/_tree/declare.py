"""Declarations of classes: which fields are trained, and which always hold the same array.

A declaration belongs to a class, never to an instance. It comes from the metadata of a dataclass field (`field`, for
classes that you write) or from the registry below (`declare`, for classes that you do not own).
"""

import dataclasses
import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax

from .paths import Glob, join_path, nearest, quote, split_path
from .static_keys import with_object
from .text import describe, function_name, warn

Given = Mapping[str, str | tuple[str, Callable[[jax.Array], jax.Array]]]
"""Ties as users write them: `{alias: path}` or `{alias: (path, transform)}`."""


class Declared(NamedTuple):
    """Everything that is declared for one class, bases included; paths are relative to an instance."""

    fields: dict[str, bool]  # `trainable` of the fields whose metadata have it
    frozen: tuple[str, ...]  # globs
    ties: dict[str, tuple[str, Callable[..., Any] | None]]  # by alias the path of the source, and the transform
    holds_buffers: bool = False  # whether its arrays are buffers, such as running statistics, and never parameters


# Classes known without importing their packages: fields that their authors hold fixed are fixed here too.
_BY_NAME = {
    "equinox.StateIndex": ("init",),  # running statistics, before `eqx.nn.make_with_state` moves them ...
    "equinox.State": ("**",),  # ... to here
    "paramax.NonTrainable": ("tree",),
}


# The declarations made by `declare`, and their version: anything derived from an earlier version is stale.
registry = types.SimpleNamespace(classes=weakref.WeakKeyDictionary[type, Declared](), version=0)

if TYPE_CHECKING:  # a type checker knows the field specifiers of `eqx.Module` by their names
    from equinox import field as field
else:

    def field(
        *,
        trainable: bool | None = None,
        tied_to: str | None = None,
        transform: Callable[[jax.Array], jax.Array] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Declares a field like `equinox.field`, and whether its parameters train or which parameter it is tied to.

        >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
        >>> class Codec(eqx.Module):
        ...     mean: jax.Array = tp.field(trainable=False)
        ...     encoder: jax.Array
        ...     decoder: jax.Array = tp.field(tied_to="encoder", transform=jnp.transpose)
        >>> print(tp.layout(Codec(jnp.zeros(3), jnp.ones((2, 3)), jnp.ones((3, 2)))))
        path     shape  dtype    elements  bytes  role     tied to
        mean     3      float32         3   12 B  frozen
        encoder  2,3    float32         6   24 B  trained  decoder (transpose)
        <BLANKLINE>
        trained  6 elements in 1 array, 24 B
        frozen   3 elements in 1 array, 12 B

        The declaration is stored in the field's metadata, so it works with `converter=`, `static=`, defaults and
        inheritance (a subclass that redefines the field decides anew). In a plain dataclass that is a pytree, write
        `dataclasses.field(metadata={"trainable": False})`.

        Args:
            trainable: `False` freezes every parameter at or below the field; a `True` further down does not thaw it.
                `True` is a promise: if the field's own value is a leaf that cannot be trained (a Python float, an int
                array), `tp.layout` raises a `TypeError`. `None`, the default, declares nothing: parameters are trained.
            tied_to: the path, relative to the instance, of the parameter that this field's array is tied to. It may be
                deeper (`"layers.0.weight"`). If the field holds `None` instead of an array, there is no tie. To declare
                ties of arrays further down, use `tp.declare(cls, ties=...)`. `tp.tie(model)` sets the array at the
                field.
            transform: the linear function from that parameter to the field's array, as for `tp.layout`. With `None`,
                the field holds the parameter itself.
            **kwargs: see `equinox.field`.

        Returns:
            A dataclass field.

        Raises:
            TypeError: `trainable` is not a bool, or `tied_to` is not a path.
            ValueError: the field is static, so it holds no leaves; you passed a transform without `tied_to`.
        """
        said: dict[str, Any] = {}
        if trainable is not None:
            said["trainable"] = _bool(trainable, "tp.field")
        if tied_to is not None:
            said["tied_to"] = tied_to if transform is None else (tied_to, transform)
            _read_source(said["tied_to"], "tp.field")
        elif transform is not None:
            raise ValueError('transform= needs the path of a parameter: tp.field(tied_to="embed", transform=...)')
        if kwargs.get("static") and (trainable or tied_to is not None):
            name = "tied_to=" if tied_to is not None else "trainable=True"
            raise ValueError(f"a static field is not part of the tree: drop `static=True` or `{name}`")
        kwargs["metadata"] = {**dict(kwargs.get("metadata", ())), **said}
        return eqx.field(**kwargs)

    # What equinox and dataclasses take is said too, for help and for the answer to an argument that there is not.
    _parameters = dict[str, inspect.Parameter]()
    for _each in (field, eqx.field, dataclasses.field):
        _parameters |= inspect.signature(_each).parameters
    field.__signature__ = inspect.Signature([its for its in _parameters.values() if its.kind is its.KEYWORD_ONLY])


def declare(cls: type, *, freeze: str | Sequence[str] = (), ties: Given | None = None) -> None:
    """Declares which fields of a class are frozen and which are tied in every instance.

    Use it for classes that you do not own. In your own classes use `tp.field`, except for ties of arrays further down.

    >>> import equinox as eqx, jax, treeparams as tp
    >>> class Norm(eqx.nn.LayerNorm):  # stands for a class of another package
    ...     pass
    >>> tp.declare(Norm, freeze="bias")
    >>> tp.layout(Norm(4)).paths
    ('weight',)

    To freeze names in dictionaries, declare them for `dict`: `tp.declare(dict, freeze="batch_stats")` freezes
    everything under that key in any dictionary of the process, such as Flax's variables.

    Subclasses inherit the declaration. A second declaration for a class replaces the first. Programs that plain
    `jax.jit` has compiled do not change, so declare before the first call.

    Args:
        cls: the class of a pytree node.
        freeze: globs over paths relative to an instance; all parameters at or below a match are frozen.
        ties: `{alias: path}` or `{alias: (path, transform)}`, paths relative to an instance; as for `tp.layout`.

    Warns:
        UserWarning: `cls` is a module of Flax's nnx, whose state, `nnx.split`, is of another class.

    Raises:
        TypeError: `cls` is not a class.
        ValueError: the class is a dataclass or NamedTuple and has no such field.
    """
    if not isinstance(cls, type):
        got = repr(cls) if isinstance(cls, str) else describe(cls)
        raise TypeError(f"tp.declare expects a class, got {got}; for one model write tp.layout(model, freeze=...)")
    frozen = (freeze,) if isinstance(freeze, str) else freeze
    if not (isinstance(frozen, Sequence) and all(isinstance(glob, str) for glob in frozen)):
        raise TypeError(f'freeze must be a glob over paths or several, such as "bias" or "**", got {describe(frozen)}')
    frozen, read = tuple(frozen), read_ties(ties or {}, "tp.declare")
    names = getattr(cls, "_fields", ())  # of a NamedTuple
    if dataclasses.is_dataclass(cls):
        names = [each.name for each in dataclasses.fields(cls)]
    for path in (*frozen, *read, *(path for path, _ in read.values())) if names else ():
        first = split_path(path)[:1]
        if not any(first and Glob(join_path(first)).selects((quote(name),)) for name in names):
            raise ValueError(f"{cls.__qualname__} has no field for {path!r}{nearest(path, names)}")
    if _is_flax(cls, "Module"):
        layout = "write tp.layout(state, freeze=..., ties=...) and pass that layout"
        warn(f"{cls.__qualname__}: a state of nnx.split does not know its class, so this has no effect on it: {layout}")
    registry.classes[cls] = Declared({}, frozen, read)
    registry.version += 1


@with_object
def declared(cls: type, version: int) -> Declared:
    """Returns the declarations of a class and its bases, as of a version of the registry."""
    del version  # for the memory alone
    fields: dict[str, bool] = {}
    ties: dict[str, Any] = {}
    for each in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        where = f"{cls.__qualname__}.{each.name}"
        if "trainable" in each.metadata:
            fields[each.name] = _bool(each.metadata["trainable"], where)
        if "tied_to" in each.metadata:
            ties[quote(each.name)] = _read_source(each.metadata["tied_to"], where)
    # Of Flax's variables only `nnx.Param` is a parameter: not a cache, a statistic, an intermediate result.
    is_variable = _is_flax(cls, "Variable") and not _is_flax(cls, "Param")
    frozen = ["**"] if is_variable else []
    # Bases come first, so that of two declarations of one alias the subclass's holds; frozen globs add up.
    for base in reversed(cls.__mro__):
        frozen += _BY_NAME.get(_qualified(base), ())
        if base in registry.classes:
            frozen += registry.classes[base].frozen
            ties |= registry.classes[base].ties
    holds_buffers = is_variable or issubclass(cls, (eqx.nn.StateIndex, eqx.nn.State))
    return Declared(fields, tuple(frozen), ties, holds_buffers)


def _qualified(cls: type) -> str:
    return f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"


@with_object
def is_box(cls: type) -> bool:
    """Returns whether a node of this class only wraps one value and adds no entry to a path (`flax.nnx.Variable`)."""
    return _qualified(cls) == "treeparams.Marked" or _is_flax(cls, "Variable", "VariableState")


def _is_flax(cls: type, *names: str) -> bool:
    return not {base.__name__ for base in cls.__mro__ if base.__module__.startswith("flax.nnx")}.isdisjoint(names)


def _bool(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{where}: `trainable` must be True or False, got {value!r}; trainable=False freezes")
    return value


def read_ties(ties: object, where: str) -> dict[str, tuple[str, Callable[..., Any] | None]]:
    """Returns ties by their aliases: the path of the source, and the function of a tie that has one."""
    if not isinstance(ties, Mapping):
        expected = "ties must be a dictionary {alias: path} or {alias: (path, transform)}"
        raise TypeError(f"{expected}, got {describe(ties)}")
    for alias in ties:
        if not isinstance(alias, str):
            raise TypeError(f"ties: an alias must be a path such as 'head.weight', got {function_name(alias)}")
    return {alias: _read_source(source, f"{where}, {alias!r}") for alias, source in ties.items()}


def _read_source(source: object, where: str) -> tuple[str, Callable[..., Any] | None]:
    path, transform = source if isinstance(source, tuple) and len(source) == 2 else (source, None)
    if not isinstance(path, str) or not (transform is None or callable(transform)):
        got = function_name(source) if callable(source) else f"{source!r:.80}"
        raise TypeError(f"{where}: a tie needs a path such as 'embed.weight', or (path, transform), got {got}")
    return path, transform
