"""Files of named arrays in the safetensors format.

The files, from the ground up:

    source    where bytes are: a file on a disk, replaced only when all of the new one is there, or a message in memory
    arrays    the safetensors format: a header, checked before anything is read; arrays as it stores them, and back
    values    numbers and texts as words of a file, and back; histories of states of optimisers
    file      a file of named arrays: written whole or not at all, each array checked as it is read
    names     named arrays, each read when you access it; how names are spelt
"""
