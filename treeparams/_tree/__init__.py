"""Any pytree: its static half, and its description in words.

The files, from the bottom up:

    types        PyTree, TreeDef, for type checkers and at run time
    dtypes       which are floating or complex, which one holds several; arrays in another one
    refs         arrays that can be written
    paths        key paths as text and back; the nearest path to a misspelt one
    globs        globs over paths; the text that their stars match
    static_keys  static values compared by type and content; facts about an object while it lives
    text         columns; values in words
    tables       tables as text and as HTML
    declare      field, declare: which fields of a class are frozen or tied
    flattening   trees flattened, with a clear error for one that contains itself; treedefs
    structure    the static half of a tree: nodes, paths, shapes, arrays at several paths
    difference   Diff; the differences of two structures, in words
    elements     how two arrays of one shape differ in their elements
    memory       facts about leaves of models that were met, for warnings
    messages     warnings at the line of the caller; the error of a deleted array
    recognise    recognises a tree whose structure is known
    copying      copy: every array in a new buffer
"""
