"""Several processes: none outlives the others, and all find out that they differ.

The files, from the ground up:

    agree        whether all processes say the same, and what they compare before they start
    interrupted  interrupted: SIGTERM, at the same step in all processes
    patience     an end to waiting for processes that live and do not come
    initialize   initialize
"""
