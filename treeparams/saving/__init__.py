"""Arrays by name: trees into files and back, and from any arrays by name into a model.

`save` and `load` keep a tree - model, optimiser, average - in one file, by path. `plan` says which array goes where,
from any arrays by name into a model, before you load anything; it takes states and averages along. The files, from the
ground up:

    _format     the safetensors format: a header, checked before anything is read
    _arrays     arrays as the format holds them, and back
    _contents   the arrays of a tree that are stored, each once; ties and histories in words
    _file       a file of arrays by name: written whole or not at all, read one array at a time
    _rename     from names to names by globs: routes
    _names      names: arrays by name, whatever they come from
    _unlike     how a tree differs from a file, in words
    _elements   which element goes where, read from the program of a function
    _moves      which array comes to each array of a model, and which do not fit
    _save       save, load, metadata
    _migration  states and averages of the model before, as those of the model after
    _plan       plan, Plan
"""

from ._names import names as names
from ._plan import Plan as Plan, plan as plan
from ._save import load as load, metadata as metadata, save as save
