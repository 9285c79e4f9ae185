"""Compiled programs, read from their text: how much one run moves between devices, and how much it computes.

The files, from the ground up:

    hlo          the text of a compiled program, parsed
    loops        how often a loop runs
    sums         sums over all that one run of a compiled program does
    groups       the devices that a collective is between, and the axes of the mesh that they are along
    products     how much a compiled program computes
    collectives  collectives: how much a compiled program moves between devices
"""
