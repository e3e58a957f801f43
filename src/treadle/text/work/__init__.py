"""Text work in processes that may be killed: loading, rendering, tokenizing, parsing of large bodies.

`forkserver` runs in a process of its own: it loads tokenizer and template once and forks workers, which share that
memory. `crew` is the server's side: it queues pieces of work, hands each to a free worker, and replaces workers that
break a limit of time or memory. Only `crew` and `process` belong to the event loop.
"""
