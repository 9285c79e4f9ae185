"""Places arrays on a mesh, whether they are values, traced or shapes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from .._forms.mesh import lay


def put_leaf(leaf: jax.Array | np.ndarray | jax.ShapeDtypeStruct, sharding: NamedSharding, is_own: bool = False) -> Any:
    """Places an array on a mesh, in a new buffer unless `is_own` says it has one; a shape gets its sharding."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if isinstance(sharding.mesh, jax.sharding.AbstractMesh):
        raise ValueError(
            "an AbstractMesh has no devices, so you can only look at a plan over it; make the mesh with jax.make_mesh, "
            "or pass jax.ShapeDtypeStructs, as jax.eval_shape returns them"
        )
    if isinstance(leaf, Tracer):
        return lay(leaf, sharding)
    if isinstance(leaf, np.ndarray):
        leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype))
    if sharding.is_fully_addressable:
        # Copy first: `device_put` does not copy an array that is already on the device, even with `may_alias=False`.
        return jax.device_put(leaf if is_own else jnp.copy(leaf), sharding)
    if not getattr(leaf, "is_fully_addressable", True):
        return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
    # Over several processes each gives what its own devices have.
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    values = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    array = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if is_key else array
