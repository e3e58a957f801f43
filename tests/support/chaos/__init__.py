"""Seeded chaos against a real server: a plan of clients and faults, the clients, the faults, and the oracle.

`benchmarks/chaos.py` and `benchmarks/soak.py` run it by the hour, `tests/serve/test_chaos.py` for seconds.
"""
