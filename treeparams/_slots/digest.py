"""A short text that differs between different layouts, for files, messages and other processes."""

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence

from .._tree.structure import Structure
from .ties import Alias


def digest_of(structure: Structure, trained: Sequence[bool], ties: Iterable[Alias]) -> str:
    """Returns a digest of paths, shapes, dtypes, trained leaves and ties.

    It leaves out node types, static values and leaves that are not arrays, so a dictionary that becomes a class keeps
    its digest.
    """
    paths, in_words = structure.paths, functools.cache(str)  # of few dtypes, which NumPy names slowly
    # In tree order, since that is how slots follow one another in a vector and in stacks.
    leaves = [
        [path, list(spec.shape), in_words(spec.dtype), is_trained]
        for path, spec, is_trained in zip(paths, structure.specs, trained, strict=True)
        if spec is not None
    ]
    # A transform goes by its name and what it binds, without its module, which may be `__main__` in one process only.
    aliases = sorted([paths[tie.leaf], paths[tie.source], str(tie)] for tie in ties)
    # Whoever changes this text makes all checkpoints foreign.
    text = json.dumps([leaves, aliases], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


_LENGTH = 16
