"""Compiled loops over the elements of an array; they need the extra ``fast`` (numba).

The functions of ``kernels`` and ``counting`` are plain Python; ``loops`` compiles them for float32 arrays in
one piece of memory. Callers keep the array functions beside them, which give the same results, bit for bit, and serve
everything else.
"""
