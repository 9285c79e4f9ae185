"""How matrices and constrained arrays print: with the shape that they stand for, then what they hold."""

import dataclasses
from typing import Any


def pdoc(self: Any, **kwargs: Any) -> Any:
    """For a class body, `__pdoc__ = pdoc`: `Class(shape=(3, 3), field=f32[2,3])`."""
    import wadler_lindig as wl  # what Equinox prints by; it calls this, so it is there

    fields = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self) if field.repr]
    docs = wl.named_objs([("shape", _shape(self)), *fields], **kwargs)
    name = wl.TextDoc(f"{type(self).__name__}(")
    return wl.bracketed(name, docs, wl.comma, wl.TextDoc(")"), kwargs["indent"])


def _shape(node: Any) -> Any:
    # The arrays are missing where a tree of other things has the structure of a model, such as a mask.
    try:
        return node.shape
    except AttributeError:
        return None
