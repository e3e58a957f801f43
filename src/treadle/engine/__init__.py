"""The engine: one owner of all MLX state, and the client that talks to it from the event loop."""
