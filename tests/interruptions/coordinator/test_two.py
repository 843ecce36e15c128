"""Two coordinators of one task on one broker."""

from __future__ import annotations

import pytest

from tests.interruptions.world import Worlds, upload_chunks

FENCED = 3


def test_copy_of_a_run_takes_over_from_a_coordinator_that_is_at_work(worlds: Worlds) -> None:
    """A copy of a served run folder is started: refused; then with --take-over in an open round"""
    world = worlds.make(chunk_bytes=1024)
    hold = world.proxy("one").hold(upload_chunks, after=9)
    world.start()
    hold.wait()
    world.device("two").wait_for("receipt", round=1)
    first, second = world.coordinator, world.copy_run()
    second.start()
    assert second.wait() == FENCED
    assert list(second.find(match="is online, and this folder is a copy of the one it serves"))
    assert first.running
    world.copy_run("--take-over").start()
    assert first.wait() == FENCED
    assert list(first.find(match="another coordinator of task 'digits' has taken over"))
    hold.release()
    world.finish(codes={"first": FENCED})
    world.expect_undisturbed()
    # The one that was replaced, started again as a service manager would, stays away.
    first.start()
    assert first.wait() == FENCED
    assert list(first.find(match="was started after the last one of this folder"))
    world.note("the first one stopped with exit code 3, and devices followed the second")


@pytest.mark.slow
def test_new_run_takes_over_from_one_that_is_at_work(worlds: Worlds) -> None:
    """A new run of a task is started while another is at work: refused; then with --take-over"""
    world = worlds.make()
    holds = [world.proxy(name).hold(upload_chunks) for name in ("one", "two")]
    world.start()
    for hold in holds:
        hold.wait()
    first, second = world.coordinator, world.copy_run(new=True)
    second.start()
    assert second.wait() == FENCED
    assert list(second.find(match="'digits' is online. Stop that one"))
    world.copy_run("--take-over", new=True).start()
    assert first.wait() == FENCED
    for hold in holds:
        hold.release()
    world.finish(codes={"first": FENCED})
    world.expect_undisturbed()
    world.note("devices left the first run, and finished the second")
