"""Messages about leaves that look like parameters and are not: numbers and refs; and models that train nothing."""

from .._tree.messages import AS_ARRAY, warn
from .._tree.structure import Structure
from .._tree.text import first_few, quoted
from .index import Index
from .said import declared_frozen

_FLOATS = ("float", "complex", "float16", "float32", "float64", "longdouble", "complex64", "complex128")
_PLAIN = (dict, list, tuple)


def numbers(structure: Structure) -> list[int]:
    """Returns the leaves that are floating or complex numbers of Python or NumPy."""
    return [i for i, kind in enumerate(structure.values) if kind in _FLOATS]


def no_arrays(structure: Structure) -> str:
    """Describes the leaves that are not arrays; numbers come first, since they may be mistaken for parameters."""
    first = numbers(structure)
    rest = [i for i, kind in enumerate(structure.values) if kind is not None and i not in first]
    return first_few([f"{structure.paths[i] or repr('')} ({structure.values[i]})" for i in (*first, *rest)])


def warn_of_floats(structure: Structure) -> None:
    """Warns, once per kind, of numbers beside parameters in plain containers, which no class can declare."""
    its = numbers(structure)
    if not its or structure.is_traced:
        return
    frozen, parameters = declared_frozen(structure), frozenset(structure.parameters)
    plain = {
        node.entries
        for node in structure.nodes
        if node.cls in _PLAIN and not parameters.isdisjoint(range(node.start, node.stop))
    }
    paths = [structure.paths[i] for i in its if i not in frozen and structure.entries[i][:-1] in plain]
    if paths:
        warn(
            f"{quoted(paths)}: a Python number is not a parameter and does not train. To train it, {AS_ARRAY}. If "
            "it is a constant, hold it in a static field, or outside the model",
            about=("floats", *structure.kinds[:1]),
        )


def refuse_refs(index: Index) -> None:
    """Raises a `ValueError` if a ref is among the trained parameters."""
    refs = [index.structure.paths[i] for i in sorted(index.structure.refs) if index.trained[i]]
    if refs:
        raise ValueError(
            f"expected arrays to train, got a ref, which is an array that can be written, at {quoted(refs)}. To train "
            "its value, put ref[...] or jax.freeze(ref) into the model, and make a new ref of the result, "
            f"jax.new_ref(array). To leave it out, pass freeze={refs[0]!r} to tp.layout, declare it frozen, or pass a "
            "`where` without it"
        )


def warn_of_nothing(index: Index) -> None:
    """Warns that nothing is trained, and says why."""
    structure = index.structure
    frozen = [structure.paths[i] for i in structure.parameters]
    if frozen:
        warn(
            f"nothing is trained: all parameters are frozen ({quoted(frozen, 5)}); thaw them with "
            "tp.layout(model, thaw=...)"
        )
        return
    its = quoted([structure.paths[i] for i in numbers(structure)])
    numbers_too = f", and {its}: numbers are not parameters; {AS_ARRAY}" if its else ""
    warn(f"nothing is trained: the model has no floating or complex arrays{numbers_too}")
