"""Forms: where the slots of a model are stored in a tree of arrays.

The files, from the bottom up:

    mesh         arrays that are split over several devices
    block        one array of a form: cut into many, joined from many
    form         Form, and its makers: the canonical tree, one vector, stacks, reals
    states       the parameters that each array of an optimiser's state belongs to; states regrouped
    view         View: names over a form
    restructure  Restructure; equal nodes as one, or a single node, from a form
    rolled       rolled: equal parts of a program that follow one another, as a scan
"""
