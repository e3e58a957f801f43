"""The composition root: the one place where settings become a runner, an engine and fronts.

Heavy modules are imported inside the functions that need them: the parent never needs MLX, the child never needs HTTP,
and the server listens before it knows a tokenizer.
"""
