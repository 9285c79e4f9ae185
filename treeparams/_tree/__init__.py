"""Any pytree: what is static about it, and what is said of it.

The files, from the ground up:

    types        PyTree, for type checkers and at run time
    dtypes       which are floating or complex, and what holds several of them
    paths        key paths as text and back; globs; the nearest path to a misspelt one
    static_keys  static values compared by type and content
    text         tables; values in words
    declare      field, declare: what a class says of its fields
    structure    what is static about a tree: nodes, paths, shapes, which arrays are one
    difference   Diff; what differs between two structures, in words
    messages     warnings at the line of the caller; the error of a deleted array
    lost_ties    the memory of ties that a trace, or a forgotten layout, would lose
    recognise    recognising a tree whose structure is known
"""
