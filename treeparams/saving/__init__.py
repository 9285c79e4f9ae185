"""By name: what is in a file, what goes where, and back into a model.

`save` and `load` keep a tree - model, optimiser, average - in one file, by path. `plan` says what goes where from any
arrays by name into a model, before anything is loaded, and takes states and averages along. The files, from the ground
up:

    _format    the safetensors format: a header, checked before anything is read
    _arrays    arrays as the format holds them, and back
    _contents  what of a tree is stored: each array once, ties and histories in words
    _file      a file of arrays by name: written whole or not at all, read one array at a time
    _unlike    what of a tree is not as in a file, in words
    _save      save, load, metadata
    _rename    from names to names by patterns
    _names     names: arrays by name, whatever they come from
    _elements  which element goes where, read from the program of a function
    _carry     states and averages of the model before, as those of the model after
    _fit       what comes to each array of a model, and what does not fit
    _plan      plan, Plan
"""

from ._names import names as names
from ._plan import Plan as Plan, plan as plan
from ._save import load as load, metadata as metadata, save as save
