"""Reads from the text of a compiled program how much one run moves between devices, and how much it computes.

The files, from the ground up:

    hlo          the text of a compiled program, parsed
    loops        how often a loop runs
    sums         sums over all operations of one run of a compiled program
    groups       the devices that a collective connects, and the axes of the mesh that they lie along
    products     how much a compiled program computes
    collectives  collectives: how much a compiled program moves between devices
"""
