"""Threads with deep stacks beside others that start."""

from __future__ import annotations

import threading
import time

from treadle.grammar import deep_stack


def test_threads_that_start_at_once_leave_the_stack_size_of_others() -> None:
    before = threading.stack_size()

    def start() -> None:
        for _ in range(50):
            deep_stack.call(lambda: time.sleep(0.001))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert threading.stack_size() == before
