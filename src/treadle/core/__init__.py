"""The pure core: requests, states, admission, scheduling. No clock, thread, I/O or MLX: time is an argument."""
