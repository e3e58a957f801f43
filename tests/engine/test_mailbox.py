from __future__ import annotations

import threading

from treadle.core.messages import Cancel, CancelJob, Stop, Submit, ToOwner
from treadle.engine.mailbox import Mailbox


def test_messages_are_taken_in_the_order_they_were_put():
    mailbox = Mailbox()
    messages: list[ToOwner] = [Cancel(id="a"), Submit(id="a", prompt=(1,), max_tokens=1), Cancel(id="b")]
    for message in messages:
        mailbox.put(message)
    assert mailbox.take(0.0) == messages
    assert mailbox.take(0.0) == []


def test_a_take_whose_time_is_up_returns_nothing():
    assert Mailbox().take(0.001) == []


def test_a_take_that_wakes_for_no_reason_returns_nothing_and_loses_nothing(monkeypatch):
    """A spurious wake-up is not an error, and a message put later is still there."""
    mailbox = Mailbox()
    monkeypatch.setattr(mailbox._arrived, "wait", lambda timeout: True)
    assert mailbox.take(None) == []
    mailbox.put(Stop())
    assert mailbox.take(None) == [Stop()]


def test_who_waits_for_a_message_is_told_whether_one_has_come_and_takes_none():
    mailbox = Mailbox()
    assert not mailbox.wait(0.001)
    mailbox.put(Stop())
    assert mailbox.wait(60)
    assert mailbox.take(0.0) == [Stop()]


def test_a_put_wakes_the_owner_that_waits():
    mailbox = Mailbox()
    taken: list[object] = []
    waiting = threading.Event()
    wait = mailbox._arrived.wait

    def watched(timeout: float | None = None) -> bool:
        waiting.set()
        return wait(60)

    mailbox._arrived.wait = watched  # type: ignore[method-assign]
    owner = threading.Thread(target=lambda: taken.extend(mailbox.take(None)))
    owner.start()
    assert waiting.wait(60)
    mailbox.put(Cancel(id="a"))
    owner.join(60)
    assert taken == [Cancel(id="a")]


def test_puts_of_many_threads_are_all_taken_each_in_its_own_order():
    mailbox = Mailbox()

    def put(name: str) -> None:
        for i in range(200):
            mailbox.put(Cancel(id=f"{name}{i}"))

    threads = [threading.Thread(target=put, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    taken: list[str] = []
    while any(thread.is_alive() for thread in threads):
        taken += [message.id for message in mailbox.take(0.01)]  # type: ignore[union-attr]
    taken += [message.id for message in mailbox.take(0.0)]  # type: ignore[union-attr]
    for name in "abc":
        assert [i for i in taken if i[0] == name] == [f"{name}{i}" for i in range(200)]


def test_a_jobs_cancellation_is_visible_before_it_is_taken_and_until_it_is_forgotten():
    """A5: a running job can notice."""
    mailbox = Mailbox()
    mailbox.put(CancelJob(id="j"))
    assert mailbox.job_cancelled("j")
    assert not mailbox.job_cancelled("k")
    mailbox.take(0.0)
    assert mailbox.job_cancelled("j")
    mailbox.forget_job("j")
    mailbox.forget_job("j")
    assert not mailbox.job_cancelled("j")


def test_a_stop_cancels_every_job_at_once():
    """C3: a job that polls does not hold up a shutdown."""
    mailbox = Mailbox()
    mailbox.put(Stop())
    assert mailbox.job_cancelled("any")
