"""Fuzzers: hostile input by the thousand, each case made from its kind, a seed and a number alone.

`mutate` changes bytes and JSON. `wires` makes requests for a server and judges its answers; `files` makes files of a
model and reads them as the server does, in a `child` process with limits.
"""
