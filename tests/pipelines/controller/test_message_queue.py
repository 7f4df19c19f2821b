"""The queue: taken once, expired never, remembers who took what."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from pipelines.controller.message_queue import MessageQueue
from tests.builders import make_task


def queue_of(*messages: tuple) -> MessageQueue:
    queue = MessageQueue()
    for tasks in messages:
        queue.publish(tasks)
    return queue


def test_each_message_is_taken_once_in_order() -> None:
    one, two = (make_task(0), make_task(1)), (make_task(2),)
    queue = queue_of(one, two)
    assert queue.queued() == {t.group_id for t in (*one, *two)}
    first, second = queue.pull("a", 0.0, 0.0), queue.pull("b", 0.0, 0.0)
    assert (first.tasks, second.tasks) == (one, two) and first.number < second.number
    assert queue.pull("a", 0.0, 0.0) is None and not queue.queued()
    assert queue.taken_by("a") == {t.group_id for t in one}
    assert queue.taken_by("b") == {two[0].group_id} and not queue.taken_by("c")


def test_expired_tasks_are_not_delivered() -> None:
    late, fresh = make_task(0, expires_at=10.0), make_task(1, expires_at=11.0)
    queue = queue_of((late,), (late, fresh))
    assert queue.pull("a", 10.0, 0.0).tasks == (fresh,)
    assert queue.taken_by("a") == {fresh.group_id}


def test_publishing_again_takes_a_group_from_its_dead_process() -> None:
    task = make_task(0)
    queue = queue_of((task,))
    queue.pull("dead", 0.0, 0.0)
    queue.publish((make_task(0, attempt=2),))
    assert not queue.taken_by("dead") and queue.queued() == {task.group_id}
    queue.pull("alive", 0.0, 0.0)
    assert queue.taken_by("alive") == {task.group_id}


def test_ended_groups_are_forgotten() -> None:
    tasks = (make_task(0), make_task(1))
    queue = queue_of(tasks)
    queue.pull("a", 0.0, 0.0)
    queue.keep_only([tasks[1].group_id])
    assert queue.taken_by("a") == {tasks[1].group_id}


def test_a_waiting_pull_is_woken() -> None:
    queue = MessageQueue()
    with ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(queue.pull, "a", 0.0, 30.0)
        queue.publish((make_task(0),))
        assert pulled.result(timeout=10.0).tasks == (make_task(0),)
