"""From a model to its slots, one for each distinct trained parameter.

The files, from the bottom up:

    transform  linear functions that are recognised again in other processes
    spans      nodes and leaves as spans of leaves
    where      leaves(); reads a `where`: the nodes and leaves that it matches
    nodes      the layers of a net: nodes that a `where` matches, and whether they are alike
    said       which parameters are trained: masks, declarations, freeze and thaw
    ties       ties: by identity, declared, given
    digest     a short text that differs between different layouts
    index      Slot; the place of each leaf in the model
    accidents  warnings of accidental ties, and of ties that were broken
    rules      reads `{where: value}`: the first entry that selects a parameter
    untrained  numbers, and models that train nothing, in words
    in_words   the table of an index, and how it differs from another one
    layout     Layout
    trainable  layout: from a mask, a `where` or nothing to a layout
    match      other trees matched to a model by path; project
    parts      a model taken apart, slots and rest; partition, combine
"""
