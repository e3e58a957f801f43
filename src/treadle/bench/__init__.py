"""`treadle bench`: figures of any OpenAI-compatible server, and of several side by side."""
