"""Prefix cache: an index of cached prompt prefixes, its eviction order, and a store of copied blocks."""
