"""Runs several processes together, so that all end if one ends, and all notice if they differ.

The files, from the ground up:

    agree        compares text between all processes, and makes the text they compare at the start
    interrupted  interrupted: notices SIGTERM at the same step in all processes
    patience     ends a process that waits too long for another one that is alive
    initialize   initialize
"""
