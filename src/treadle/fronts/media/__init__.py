"""Images of requests: their parts, their bytes, and their pixels for as long as a request lives."""
