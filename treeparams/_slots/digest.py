"""A short text that tells layouts apart, in files and between processes."""

import hashlib
import json

from .layout import Layout, index_of


def digest_of(layout: Layout) -> str:
    """A digest of paths, shapes, dtypes, trained leaves and ties: the same in all processes, machines and versions.

    >>> import jax.numpy as jnp, numpy as np, treeparams as tp
    >>> of = lambda model: digest_of(tp.layout(model))
    >>> of({"w": jnp.ones(3)}), of({"w": np.ones(3, np.float32)}), of({"w": jnp.ones(4)})
    ('d9a89746af407a62', 'd9a89746af407a62', 'ad6dd18672a8abe2')

    Node types, static values and leaves that are no arrays are not in it: a dictionary that becomes a class keeps its
    digest. Of a tie with a transform it says that there is one, and not which.
    """
    index = index_of(layout)
    structure, paths = index.structure, index.structure.paths
    # In tree order, since that is how slots follow one another in a vector and in stacks.
    leaves = [
        [path, list(spec.shape), str(spec.dtype), trained]
        for path, spec, trained in zip(paths, structure.specs, index.trained, strict=True)
        if spec is not None
    ]
    ties = sorted([paths[tie.leaf], paths[tie.source], bool(tie.transforms)] for tie in index.ties)
    # Whoever changes this text makes all checkpoints foreign.
    text = json.dumps([leaves, ties], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


_LENGTH = 16
