"""Files of named arrays in the safetensors format.

The files, from the ground up:

    source    where bytes are: a file on a disk, replaced only when all of the new one is there, or a message in memory
    arrays    arrays of JAX and NumPy: their dtypes in JAX, and copies where other arrays are
    file      a file of named arrays in the safetensors format: written whole or not at all, each array checked
    values    numbers and texts as words of a file, and back; histories of states of optimisers
    names     named arrays, each read when you access it; how names are spelt
"""
