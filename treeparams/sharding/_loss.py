"""The loss of a step: its value and its gradient over a mesh, and its further results, in the dtypes it computes in.

A loss is a function of the whole batch, and XLA divides it. Three constraints say how: examples lie along the batch
axes, weights are whole where the loss reads them, and gradients lie as the weights rest. So XLA gathers each weight
once, and sums and divides each gradient in one reduce-scatter, where its compiler has such a pass (TPU and GPU). Since
nothing is divided by hand, any loss has the numbers of one device.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from .._forms.block import Block
from .._forms.form import Form
from .._forms.mesh import lay
from .._forms.restructure import Restructure, halves_of
from .._slots.layout import index_of
from .._slots.parts import Rest
from .._slots.where import name_of
from .._tree.text import describe, quoted
from .._tree.types import PyTree, common_dtype, widened
from ._placement import Placement, described
from ._specs import Axes, automatic, axes_named, first_divided, mesh_within, put_leaf


@dataclasses.dataclass(frozen=True, eq=False)
class _Compute:
    """The dtype of each leaf of a model within the loss."""

    form: Form  # of the parameters, as they are within the loss
    of_path: dict[str, Any]  # of arrays of the model; others keep their own

    @classmethod
    def of(cls, placement: Placement, compute_dtype: Any) -> "_Compute":
        """Makes the dtypes from the option of `make_step`."""
        layout, of_path = placement.layout, _of_paths(placement, compute_dtype)
        found = _form_in(placement.form, [of_path.get(slot.path) for slot in layout.slots])
        for block, members in zip(found.blocks, found.members, strict=True):
            own = {of_path.get(layout.slots[slot].path) for slot in members}
            if block.length is not None and not block.rank and len(own) > 1:
                words = quoted([str(each or "its own") for each in sorted(own, key=str)])
                raise ValueError(
                    f"a vector is moved in one dtype, but compute_dtype gives its parameters {words}; use "
                    'form="stacks" or form="tree", or one dtype for all'
                )
        return cls(found, of_path)

    @property
    def in_words(self) -> str:
        """The dtypes in one line."""
        return f"computed in {', '.join(sorted({str(each) for each in self.of_path.values()})) or 'their dtypes'}"

    def params(self, leaves: Sequence[Any]) -> list[Any]:
        """Casts arrays of parameters."""
        return [leaf.astype(block.dtype) for leaf, block in zip(leaves, self.form.blocks, strict=True)]

    def rest(self, rest: Rest[Any] | Restructure[Any]) -> Any:
        """Casts the arrays of the rest of a model."""
        if isinstance(rest, Restructure):
            single, _, held, stacks = halves_of(rest)
            dtypes = [self.of_path.get(path) for path in single.paths]
            held = _form_in(held, dtypes)
            alone = [dtype for i, dtype in enumerate(dtypes) if i not in held.locations]
            rest = Restructure(single, stacks, self.form, held)
            dtypes = [*alone, *(block.dtype for block in held.blocks)]
        else:
            dtypes = [self.of_path.get(path) for path in rest.paths]
        leaves, treedef = jtu.tree_flatten(rest)
        pairs = zip(leaves, dtypes, strict=True)
        return treedef.unflatten([leaf if dtype is None else leaf.astype(dtype) for leaf, dtype in pairs])


def _of_paths(placement: Placement, compute_dtype: Any) -> dict[str, Any]:
    """Returns the dtype of each real parameter of a model that gets one, trained or frozen, by path."""
    if compute_dtype is None:
        return {}
    rules = compute_dtype if isinstance(compute_dtype, Mapping) else {"**": compute_dtype}
    dtypes = [_floating(f"compute_dtype of {name_of(where)}", dtype) for where, dtype in rules.items()]
    index = index_of(placement.layout)
    structure = index.structure
    found = index.first_entries(list(rules), asked=index.distinct)
    kept = placement.frozen_sources.union(index.positions)  # buffers are as they are
    real = [i for i in found if i in kept and jnp.issubdtype(structure.spec(i).dtype, jnp.floating)]
    return {structure.paths[i]: dtypes[found[i]] for i in real}


def _floating(name: str, dtype: Any) -> Any:
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"{name}: expected a floating dtype, such as jnp.bfloat16, got {describe(dtype)}") from error
    if not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{name}: expected a floating dtype, such as jnp.bfloat16, got {found}")
    return found


def _form_in(form: Form, dtypes: Sequence[Any]) -> Form:
    """Returns a form with a new dtype for each slot; `None` keeps the dtype."""
    pairs = zip(form.blocks, form.members, strict=True)
    blocks = tuple([_in_dtypes(block, [dtypes[slot] for slot in members]) for block, members in pairs])
    return dataclasses.replace(form, blocks=blocks)


def _in_dtypes(block: Block, dtypes: Sequence[Any]) -> Block:
    """Returns a block with a new dtype for each array (`None` keeps it). The block gets the widest of them."""
    own = block.dtypes or (block.dtype,) * len(dtypes)
    chosen = tuple([each if dtype is None else dtype for dtype, each in zip(dtypes, own, strict=True)])
    if chosen == own:
        return block
    return dataclasses.replace(block, dtypes=chosen, dtype=common_dtype(chosen))


class _Found(NamedTuple):
    """The results of a loss, and its gradient."""

    value: Any
    gradients: PyTree
    aux: PyTree
    model_state: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A loss over a batch that devices share, and the user's options about it."""

    function: Callable[..., Any]
    placement: Placement
    compute: _Compute
    pieces: int  # in which the batch is taken, one after another
    takes_form: bool  # whether it is of parameters in their form and of the way back, and not of the model
    has_aux: bool
    has_state: bool

    @classmethod
    def of(cls, function: Callable[..., Any], placement: Placement, compute_dtype: Any, **options: Any) -> "Loss":
        """Makes the loss from the options of `make_step`."""
        return cls(function, placement, _Compute.of(placement, compute_dtype), **options)

    @property
    def in_words(self) -> str:
        """The options in one line."""
        taken = "form" if self.takes_form else "model"
        said = [f"in {self.pieces} pieces"] + ["has aux"] * self.has_aux + ["has state"] * self.has_state
        return ", ".join([f"the loss takes the {taken}", *said, self.compute.in_words])

    @property
    def takes_restructure(self) -> bool:
        """Whether the loss opens parameters by a `Restructure`; a canonical tree is opened by `tp.combine`."""
        return self.takes_form and self.placement.name != "tree"

    @property
    def is_lazy(self) -> bool:
        """Whether weights are made whole node by node, where the loss reads them."""
        placement = self.placement
        return self.takes_form and placement.name == "stacks" and any(map(axes_named, placement.specs))

    def __call__(self, params: PyTree, rest: Any, model_state: Any, batch: PyTree) -> _Found:
        """Returns the value of the loss, its gradient, sharded as the parameters are, and its other results."""
        placement = self.placement
        self._check_arguments(batch)
        arrays, treedef, shardings = self._taken(batch)
        batch = treedef.unflatten(list(map(lay, map(jnp.asarray, arrays), shardings)))
        whole = placement.whole
        run = automatic(self._found, _Found(whole, placement.params, whole, whole), placement.axes.mesh)
        return run(params, rest, model_state, batch)

    # -- The batch

    def put(self, batch: PyTree) -> PyTree:
        """Places a batch on the devices. Python numbers, shapes and traced arrays are returned unchanged.

        `jax.jit` would compile one program for NumPy arrays, one for arrays on one device and one for arrays sharded
        like this.
        """
        leaves, treedef, shardings = self._taken(batch)
        return treedef.unflatten(list(map(_put_where, leaves, shardings)))

    def _taken(self, batch: PyTree) -> tuple[list[Any], Any, list[NamedSharding]]:
        """Checks a batch, and returns its arrays, its treedef and their shardings: examples split, scalars whole."""
        arrays, treedef = jtu.tree_flatten_with_path(batch)
        self._check(arrays)
        along, whole = self.placement.batch, self.placement.whole
        leaves = [array for _, array in arrays]
        return leaves, treedef, [along if jnp.ndim(leaf) else whole for leaf in leaves]

    def _check_arguments(self, batch: Sequence[Any]) -> None:
        """Checks that the loss takes this batch."""
        before = 1 + self.takes_form + self.has_state
        try:
            inspect.signature(self.function).bind(*[None] * before, *batch)
        except ValueError:  # a function without a signature
            pass
        except TypeError as error:
            got = ", ".join(map(describe, batch)) or "nothing"
            raise TypeError(
                f"the loss does not take this batch ({error}): step got {got} after params and state. Pass the "
                "arguments of the loss one by one: step(params, state, x, y)"
            ) from None

    def _check(self, arrays: Sequence[tuple[Any, Any]]) -> None:
        """Checks that the devices can share the examples equally."""
        counts = [(path, jnp.shape(array)[0]) for path, array in arrays if jnp.ndim(array)]
        if not counts and self.pieces == 1:
            return
        # Each call of a step comes by here: names are made of paths for an error alone.
        (first, count), *others = counts or [((), 0)]
        for path, its in others:
            if its != count:
                raise ValueError(
                    f"{_batch_path(first)} has {count} examples and {_batch_path(path)} {its}; the leading axis of "
                    "each array of a batch must run over the examples. Pass other arrays to the loss itself, for "
                    "example by functools.partial; make a raw PRNG key a typed one, jax.random.wrap_key_data(key)"
                )
        axes = self.placement.axes
        least = axes.along(axes.batch) * self.pieces
        if not count or count % least:
            in_pieces = f" in {self.pieces} pieces" if self.pieces > 1 else ""
            raise ValueError(
                f"{_batch_path(first)} has {count} examples, which {axes.along(axes.batch)} devices along "
                f"{quoted(axes.batch)} cannot share equally{in_pieces}; give a multiple of {least}"
            )

    # -- The value and its gradient

    def _found(self, params: PyTree, rest: Any, model_state: Any, batch: PyTree) -> _Found:
        """Does the work of a call where XLA alone decides where arrays lie."""
        leaves, rest = self._entered(params, rest)
        arrays, treedef = jtu.tree_flatten(batch)
        if self.pieces == 1:
            found = self._of_piece(leaves, rest, model_state, batch)
        else:
            # Piece i is x[i::k]: so each device has its part of each piece already.
            along = [self._in_pieces(array) if array.ndim else None for array in arrays]
            zeros = self._laid([jnp.zeros(leaf.shape, widened(leaf.dtype)) for leaf in leaves])

            def turn(carry: Any, piece: Sequence[Any]) -> Any:
                state, sums = carry
                piece = [array if own is None else own for array, own in zip(arrays, piece, strict=True)]
                value, grads, aux, state = self._of_piece(leaves, rest, state, treedef.unflatten(piece))
                return (state, list(map(jnp.add, sums, grads))), (value, aux)

            (after, sums), (values, aux) = jax.lax.scan(turn, (model_state, zeros), along)
            value = jnp.mean(values.astype(widened(values.dtype)))
            found = _Found(value, [each / self.pieces for each in sums], aux, after)
        pairs = zip(found.gradients, jtu.tree_leaves(params), strict=True)
        return found._replace(gradients=self.placement.tree([each.astype(like.dtype) for each, like in pairs]))

    def _in_pieces(self, array: jax.Array) -> jax.Array:
        pieces = jnp.swapaxes(array.reshape(-1, self.pieces, *array.shape[1:]), 0, 1)
        return self._constrained(pieces, PartitionSpec(None, self.placement.axes.batch))

    def _of_piece(self, leaves: Sequence[Any], rest: Any, model_state: Any, batch: PyTree) -> _Found:
        def value(leaves: Sequence[Any]) -> Any:
            state = [model_state] if self.has_state else []
            return self._checked(self.function(*self._given(leaves, rest), *state, *batch), model_state)

        (found, (aux, after)), grads = jax.value_and_grad(value, has_aux=True)(leaves)
        return _Found(found, self._laid(grads), aux, after)

    def _laid(self, gradients: Sequence[Any]) -> list[Any]:
        """Widens gradients, at least to float32, and lays them as the parameters rest."""
        wide = [each.astype(widened(each.dtype)) for each in gradients]
        # XLA would divide the gradient of each leaf in a vector, and then bring all of these together again.
        pairs = zip(wide, self.placement.vectors, strict=True)
        wide = [self._constrained(each, PartitionSpec()) if is_vector else each for each, is_vector in pairs]
        if self.is_lazy:
            wide = self._divided(wide)
        return list(map(self._constrained, wide, self.placement.specs))

    def _constrained(self, array: Any, spec: PartitionSpec) -> Any:
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh_within(self.placement.axes.mesh), spec))

    # -- What the loss gets and returns

    def _entered(self, params: PyTree, rest: Any) -> tuple[list[Any], Any]:
        """Returns parameters and the rest in the dtypes of the loss, so that narrow ones are moved, and whole."""
        axes, placement = self.placement.axes, self.placement
        specs = placement.frozen.specs(rest)
        # Laid where they rest, too, after the cast: otherwise XLA makes them whole first, and casts them then.
        leaves = list(map(self._constrained, self.compute.params(jtu.tree_leaves(params)), placement.specs))
        frozen, treedef = jtu.tree_flatten(self.compute.rest(rest))
        of_rest = jtu.tree_leaves(specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
        frozen = list(map(self._constrained, frozen, of_rest))
        if self.is_lazy:
            return self._divided(leaves), treedef.unflatten(frozen)
        frozen = list(map(self._constrained, frozen, map(axes.gathered, of_rest)))
        leaves = list(map(self._constrained, leaves, map(axes.gathered, placement.specs)))
        return leaves, treedef.unflatten(frozen)

    def _divided(self, stacks: Sequence[Any]) -> list[Any]:
        """Divides each row that is owned, by one exchange, so that it can be gathered from all devices."""
        axes = self.placement.axes
        specs = [_by_columns(stack, spec, axes) for stack, spec in zip(stacks, self.placement.specs, strict=True)]
        return list(map(self._constrained, stacks, specs))

    def _given(self, leaves: Sequence[Any], rest: Any) -> tuple[Any, ...]:
        """Returns the first arguments of the loss: the model, or the parameters in their form and the rest."""
        if self.is_lazy:
            single, form, held, stacks = halves_of(rest)
            rest = Restructure(single, stacks, form, held, self._gathered)
        if self.takes_form:
            return self.placement.tree(leaves), rest
        return (rest.model(self.compute.form.cut_leaves(leaves)),)

    def _gathered(self, tree: PyTree) -> PyTree:
        """Makes the arrays of a tree whole along the batch; along other axes they stay as rows of their shape rest."""
        axes, placement = self.placement.axes, self.placement
        pairs = zip(placement.form.blocks, placement.specs, strict=True)
        specs = {block.shape[1:]: axes.gathered(PartitionSpec(*spec[1:])) for block, spec in pairs}
        lay = lambda leaf: self._constrained(leaf, specs.get(leaf.shape, PartitionSpec()))
        return jax.tree.map(lambda leaf: lay(leaf) if eqx.is_inexact_array(leaf) else leaf, tree)

    def _checked(self, result: Any, before: Any) -> Any:
        """Returns the value that the loss returned, and its other results."""
        aux = after = None
        if self.has_state:
            result, after = _pair_returned(result, "has_state=True", "(value, state)")
            _check_model_state(before, after)
        if self.has_aux:
            result, aux = _pair_returned(result, "has_aux=True", "(value, aux)")
            aux = jax.tree.map(jnp.asarray, aux)
        is_number = getattr(result, "shape", None) == () and jnp.issubdtype(result.dtype, jnp.floating)
        if is_number or isinstance(result, float):
            return jnp.asarray(result), (aux, after)
        remedy = "Return (value, aux) and pass has_aux=True; or, of a sum and a weight, return the quotient"
        raise TypeError(f"the loss must return one real number, got {_result_in_words(result)}. {remedy}")


def _by_columns(stack: Any, spec: PartitionSpec, axes: Axes) -> PartitionSpec:
    """Returns the spec that divides each row of a stack, if its rows are owned; the columns of it are split then."""
    if not spec or spec[0] is None:
        return spec
    axis = first_divided(stack.shape[1:], axes.devices)
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * (1 + axis), axes.split_entry)


def _pair_returned(result: Any, option: str, expected: str) -> tuple[Any, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise TypeError(f"with {option} the loss must return {expected}, got {_result_in_words(result)}")


def _result_in_words(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else describe(result)


def _check_model_state(before: PyTree, after: PyTree) -> None:
    """Checks that the loss returned a state with the tree, shapes and dtypes of the one it was given."""
    ours, its = (dict(described(tree, describe)) for tree in (before, after))
    for path in [path for path in {**ours, **its} if ours.get(path) != its.get(path)][:1]:
        raise ValueError(
            f"the loss returned a different state of the model than it was given: state{path} was "
            f"{ours.get(path, 'nothing')} and is {its.get(path, 'nothing')}; return one with the same tree, shapes and "
            "dtypes"
        )


def _put_where(leaf: Any, to: NamedSharding) -> Any:
    is_value = hasattr(leaf, "dtype") and not isinstance(leaf, (Tracer, jax.ShapeDtypeStruct))
    if not is_value or getattr(leaf, "sharding", None) == to:
        return leaf
    return put_leaf(np.asarray(leaf) if isinstance(leaf, np.generic) else leaf, to, is_own=True)


def _batch_path(path: tuple[Any, ...]) -> str:
    return f"batch{jtu.keystr(path)}" if path else "the batch"
