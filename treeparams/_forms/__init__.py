"""Forms: where the slots of a model are stored in a tree of arrays.

The files, from the bottom up:

    mesh         arrays that are split over several devices
    primitives   one array cut into many, many joined into one
    block        one array of a form, and the places of slots in it
    form         Form; stacks as a pytree
    makers       the canonical tree, one vector, stacks, reals: a function for each
    owners       the parameters that each array of an optimiser's state belongs to
    states       optimiser states regrouped: cut into pieces and joined
    view         View: names over a form
    layers       equal nodes as one, or a single node, from a form
    restructure  Restructure
    rolled       rolled: equal parts of a program that follow one another, as a scan
"""
