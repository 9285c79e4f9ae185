"""Files of arrays by name, in the safetensors format, and arrays by name as a file gives them.

The files, from the ground up:

    replacement  a file that takes the place of another one when all of it is on the disk
    source       where bytes are read from: a file on a disk, or a message in memory
    format       the safetensors format: a header, checked before anything is read
    arrays       arrays as the format holds them, and back
    change       the elements of an array that have changed, in few bytes
    values       numbers and texts as words of a file, and back
    words        the words of `save` in a file, beside the format, checked
    file         a file of arrays by name: written whole or not at all, each array checked as it is read
    names        arrays by name, each read where it is asked for; how names are spelt
    message      a file in memory, as processes send it to each other; what changes from one to the next
"""
