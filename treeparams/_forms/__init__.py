"""Where slots lie in a tree of arrays, and all that follows from it.

The files, from the ground up:

    mesh         arrays that lie over several devices
    primitives   one array cut into many, many joined into one
    block        one array of a form, and where slots lie in it
    form         Form; stacks as a pytree
    makers       the canonical tree, one vector, stacks, reals: a function for each
    owners       which array of the state of a rule is of which parameters
    states       states regrouped: cut into pieces and joined
    view         View: names over a form
    layers       equal nodes as one, single nodes by themselves: from a form
    restructure  Restructure
    repeats      equal parts of a program that follow one another
    rolled       rolled: such parts as a scan
"""
