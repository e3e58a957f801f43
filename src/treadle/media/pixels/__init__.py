"""Pixels of the families of vision models: NumPy and Pillow alone, with the values of mlx-vlm's processors.

Sizes are planned before an image is decoded, so that a wrong one costs nothing, and values are written where they are
read.
"""
