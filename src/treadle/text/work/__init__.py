"""Text workers: processes that load, render, tokenize and parse large bodies, and that may be killed.

`fork_server` is a process that loads tokenizer and template once and forks the workers, which share its memory.
`worker_pool` is the server's side: it queues items, assigns them to idle workers, and replaces workers that break a
limit of time or memory. `worker_pool` and `fork_server_process` run on the event loop.
"""
