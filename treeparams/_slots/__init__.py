"""From a model to its slots, one for each distinct trained parameter.

The files, from the ground up:

    transform  linear functions that are recognised again
    where      masks, globs, classes, leaves(): from these to the leaves that they select
    nodes      which nodes a `where` matches itself, and whether they are alike
    ties       ties: by identity, declared, given
    index      Slot; where each leaf lies
    layout     Layout
    trainable  layout: from a mask, a `where` or nothing to a layout
    match      other trees matched to a model by path; project
    parts      a model taken apart, slots and rest; partition, combine
"""
