"""Files of named arrays in the safetensors format.

The files, from the ground up:

    replacement  a file that replaces another one only when all of it is on the disk
    source       where bytes are read from: a file on a disk, or a message in memory
    format       the safetensors format: a header, checked before anything is read
    arrays       arrays as the format stores them, and back
    change       the elements of an array that have changed, in few bytes
    values       numbers and texts as words of a file, and back
    words        the words that `save` adds to a file, checked
    file         a file of named arrays: written whole or not at all, each array checked as it is read
    names        named arrays, each read when you access it; how names are spelt
    message      a file in memory, which processes send to each other; the changes from one to the next
"""
