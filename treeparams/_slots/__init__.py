"""From a model to its slots, one for each distinct trained parameter.

The files, from the bottom up:

    ties       which parameters are tied: by identity, by declarations, as given
    where      leaves(); reads a `where`; nodes that are alike; which parameters train
    index      Slot; the place of each leaf in the model, its digest and its table; reads `{where: value}`, and
               other trees by path
    accidents  ties that were met; warnings of accidental ties, and of ties that were broken
    layout     Layout; layout: from a mask, a `where` or nothing to a layout
    parts      a model taken apart, slots and rest; partition, combine, project
"""
