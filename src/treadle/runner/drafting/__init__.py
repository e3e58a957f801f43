"""Drafters: proposals of the tokens that a row gains next, which a step verifies."""
