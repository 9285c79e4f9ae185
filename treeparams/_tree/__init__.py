"""Any pytree: its static half, and the words for it.

The files, from the ground up:

    types        PyTree, TreeDef, for type checkers and at run time
    dtypes       which are floating or complex, which one holds several; arrays in another one
    paths        key paths as text and back; the nearest path to a misspelt one
    globs        globs over paths; the text that their stars stand for
    static_keys  static values compared by type and content
    text         columns; values in words
    tables       tables as text and as HTML
    declare      field, declare: which fields of a class are frozen or tied
    flattening   trees flattened, with a clear error for one that contains itself; treedefs
    structure    the static half of a tree: nodes, paths, shapes, which arrays are one
    difference   Diff; the differences of two structures, in words
    elements     how two arrays of one shape differ in their elements
    messages     warnings at the line of the caller; the error of a deleted array
    marks        pairs of leaves that something is remembered of
    numbers      where models hold Python numbers
    lost_ties    the memory of ties that a trace, or a forgotten layout, would lose
    recognise    recognising a tree whose structure is known
    copying      copy: every array in a buffer of its own
"""
