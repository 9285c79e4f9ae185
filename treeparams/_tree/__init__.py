"""Any pytree: its static half, and its description in words.

The files, from the bottom up:

    types        PyTree and TreeDef; dtypes of leaves, arrays in another one; arrays that can be written; copies
    paths        key paths as text and back; the nearest path to a misspelt one; globs, and what their stars match
    static_keys  static values compared by type and content; facts about an object while it lives
    text         values, counts and calls that do not fit in words; warnings at the line of the caller; tables
    declare      field, declare: which fields of a class are frozen or tied
    structure    the static half of a tree: nodes, paths, shapes, arrays at several paths; trees recognised
    difference   Diff; the differences of two structures, in words
"""
