"""Images for vision models: decoding and preprocessing in processes of their own, never in the server's.

`pixels` makes the pixels of each family, `child` is an image process, `workers` and `queue` are the server's side of
it. NumPy and Pillow are imported in an image process alone.
"""
