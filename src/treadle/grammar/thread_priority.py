"""Low priority for threads that compile grammars."""

from __future__ import annotations

import ctypes
import os
import sys

NICENESS = 10
"""A tenth of the share of a step's threads, on cores that both want: small grammars still take milliseconds."""
_QOS_CLASS_UTILITY = 0x11  # of Darwin's pthread/qos.h


def lower_priority(platform: str = sys.platform) -> None:
    """Let other threads go before the calling one, where the platform has a priority for single threads."""
    if platform == "darwin":
        ctypes.CDLL(None).pthread_set_qos_class_self_np(_QOS_CLASS_UTILITY, 0)
    elif platform == "linux":
        os.nice(NICENESS)  # of the calling thread alone
