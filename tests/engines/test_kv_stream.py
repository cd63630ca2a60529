"""The order of a publisher's batches: gaps, replays, restarts, epochs, ranks; without sockets."""

from __future__ import annotations

import pytest

from calinix.core.events import PodRestarted, ProbeFailed, ProbeSucceeded
from calinix.engines.kv_events import Message
from calinix.engines.kv_stream import KEEP_LOST, MAX_MISSES, REPLAY_TIMEOUT_S, REST_S
from kvkit import Engine, Told, believed, messages, told_router


def prompt(kind: int, blocks: int = 2) -> list[int]:
    """A prompt of so many blocks and one token, with nothing in common with other kinds."""
    return [kind * 1000 + at for at in range(16 * blocks + 1)]


def published(engine: Engine, count: int, kind: int = 0) -> list[Message]:
    """`count` batches, each of a new prompt (kinds `kind`, `kind` + 1 ...)."""
    found = []
    for at in range(count):
        engine.run(prompt(kind + at))
        message = engine.flush()
        assert message is not None
        found.append(message)
    return found


def believed_kinds(told: Told, *kinds: int) -> list[int]:
    """Blocks believed of these prompts."""
    return [believed(told.router, told.pod_id, prompt(kind)) for kind in kinds]


def test_a_late_gateway_hears_what_was_before() -> None:
    """At the start a replay is asked for from number 0; live batches wait behind it."""
    engine, told = Engine(1000), Told(told_router())
    early = published(engine, 3)
    told.tick()
    assert told.lines[0].asked == [0]
    (late,) = published(engine, 1, kind=3)
    told.live(late)
    assert believed_kinds(told, 0, 3) == [0, 0]
    told.replay(*early)
    assert believed_kinds(told, 0, 1, 2, 3) == [2, 2, 2, 2]
    view = told.pod.view()
    assert (view.source, view.batches, view.lost_batches) == ("events", [4], 0)


def test_live_batches_that_were_replayed_count_once() -> None:
    """What comes both ways is one copy: a single removal takes it away."""
    engine, told = Engine(2), Told(told_router())
    found = published(engine, 2)
    told.tick()
    told.live(*found)
    told.replay(*found)
    assert believed_kinds(told, 0, 1) == [0, 2]
    told.live(*published(engine, 1, kind=2))
    assert believed_kinds(told, 1, 2) == [0, 2]
    assert told.pod.view().stored == 6


def test_a_gap_is_filled_by_a_replay() -> None:
    """The replay begins with the last batch that counts, which is compared and not counted."""
    engine, told = Engine(1000), Told(told_router())
    told.tick()
    told.replay()
    first, second, third, fourth = published(engine, 4)
    told.live(first, third)
    assert told.lines[0].asked == [0, 0]
    told.live(fourth)
    told.replay(first, second, third)
    assert believed_kinds(told, 0, 1, 2, 3) == [2, 2, 2, 2]
    assert (told.source(), told.pod.view().lost_batches) == ("events", 0)


def test_what_is_lost_for_good_leaves_a_gap_and_the_rest() -> None:
    """Without replays the stream goes on, marked; what was known before stays believed."""
    engine, told = Engine(1000), Told(told_router(), can_ask=False, capacity_tokens=16 * 8)
    first, _, third = published(engine, 3)
    told.live(first, third)
    assert believed_kinds(told, 0, 1, 2) == [2, 0, 2]
    view = told.pod.view()
    assert (view.source, view.lost_batches) == ("gapped", 1)
    told.live(*published(engine, 2, kind=3))
    assert told.source() == "gapped"
    told.live(*published(engine, 1, kind=5))
    assert told.source() == "events", "its capacity was stored anew since"


def test_after_a_very_long_gap_nothing_from_before_is_believed() -> None:
    """Too many batches lost: the pod's blocks are forgotten, later ones count."""
    engine, told = Engine(1000), Told(told_router(), can_ask=False)
    (first,) = published(engine, 1)
    told.live(first)
    engine.sequence += KEEP_LOST + 1
    told.live(*published(engine, 1, kind=1))
    assert believed_kinds(told, 0, 1) == [0, 2]
    assert told.pod.view().lost_batches == KEEP_LOST + 1


def test_a_replay_that_begins_later_than_what_is_missing() -> None:
    """The publisher has dropped what is missing: that is lost, the rest of the replay counts."""
    engine, told = Engine(1000, kept=2), Told(told_router())
    published(engine, 5)
    told.tick()
    told.replay(*engine.replay(0))
    assert believed_kinds(told, 0, 1, 2, 3, 4) == [0, 0, 0, 2, 2]
    assert (told.source(), told.pod.view().lost_batches) == ("gapped", 3)


def test_a_replay_with_holes_is_asked_for_again() -> None:
    """Answers that were dropped on the way are asked for once more, from where it broke off."""
    engine, told = Engine(1000), Told(told_router())
    found = published(engine, 6)
    told.tick()
    told.replay(found[0], found[1], found[4], found[5])
    assert told.lines[0].asked == [0, 1]
    told.replay(*found[1:])
    assert believed_kinds(told, *range(6)) == [2] * 6
    assert told.source() == "events"


def test_replays_that_never_get_on_end() -> None:
    """A publisher that always leaves the same batch out is asked a few times, not for ever."""
    engine, told = Engine(1000), Told(told_router())
    found = published(engine, 3)
    told.tick()
    for _ in range(20):
        told.replay(found[0], found[2])
    assert len(told.lines[0].asked) < 8
    told.live(*published(engine, 1, kind=3))
    assert believed_kinds(told, 0, 3) == [2, 2]
    assert told.source() == "gapped"


def test_a_replay_without_an_answer_is_given_up() -> None:
    """After its time the batches that waited count, and none is asked for until a rest is over."""
    engine, told = Engine(1000), Told(told_router())
    told.tick()
    told.replay()
    first, _, third = published(engine, 3)
    told.live(first, third)
    told.tick(REPLAY_TIMEOUT_S + 0.1)
    assert told.lines[0].hung_up == 1
    assert believed_kinds(told, 0, 1, 2) == [2, 0, 2]
    assert told.source() == "gapped"
    asked = len(told.lines[0].asked)
    engine.sequence += 1
    told.live(*published(engine, 1, kind=5))
    assert len(told.lines[0].asked) == asked
    told.now += REST_S
    engine.sequence += 1
    told.live(*published(engine, 1, kind=6))
    assert len(told.lines[0].asked) == asked + 1


def test_a_request_in_the_queue_is_not_given_up() -> None:
    """Where too many replays are under way, waiting for a place is no silence."""
    told = Told(told_router())
    told.tick()
    told.lines[0].waiting = True
    told.tick(10 * REPLAY_TIMEOUT_S)
    assert told.lines[0].hung_up == 0
    told.lines[0].waiting = False
    told.tick(REPLAY_TIMEOUT_S + 0.1)
    assert told.lines[0].hung_up == 1


def test_a_publisher_that_is_gone_stands_on_history_again() -> None:
    """Several requests without an answer: the events are old, and the pod is marked so."""
    engine, told = Engine(1000), Told(told_router(), check_s=1.0)
    told.tick()
    told.replay(*published(engine, 1))
    assert told.source() == "events"
    for _ in range(MAX_MISSES):
        told.tick(1.1)
        told.tick(REPLAY_TIMEOUT_S + 0.1)
    assert told.source() == "history"
    told.live(*published(engine, 1, kind=1))
    assert told.source() == "events"
    assert believed_kinds(told, 0, 1) == [2, 2]


@pytest.mark.parametrize("numbers_before", [1, 5])
def test_numbers_that_go_back_are_another_process(numbers_before: int) -> None:
    """A restarted pod is cold at once, and what its new process stores counts."""
    engine, told = Engine(1000), Told(told_router())
    told.live(*published(engine, numbers_before))
    engine.restart()
    told.live(*published(engine, 1, kind=50))
    assert believed_kinds(told, 0, 50) == [0, 2]
    assert PodRestarted("single-0") in told.events
    assert told.pod.view().restarts == 1


def test_another_process_is_found_out_by_its_replay() -> None:
    """Its numbers have already passed the old ones, but the batch that should repeat differs."""
    old, told = Engine(1000), Told(told_router())
    told.live(*published(old, 3))
    new = Engine(1000)
    new.started = 1
    found = published(new, 6, kind=50)
    told.live(found[4])
    assert told.lines[0].asked == [2]
    told.replay(*new.replay(2))
    assert told.lines[0].asked == [2, 0]
    assert believed_kinds(told, 0, 1, 2) == [0, 0, 0]
    told.replay(*new.replay(0))
    assert believed_kinds(told, *range(50, 56)) == [2] * 6
    assert told.kinds().count("PodRestarted") == 1


def test_a_silent_pod_that_started_anew_is_found_out() -> None:
    """Asked for its last batch it has none: what was believed of it goes at once."""
    engine, told = Engine(1000), Told(told_router(), check_s=1.0)
    told.live(*published(engine, 2))
    told.tick(1.1)
    assert told.lines[0].asked == [1]
    told.replay()
    assert believed_kinds(told, 0, 1) == [0, 0]
    assert told.lines[0].asked == [1, 0]
    told.replay()
    assert told.source() == "events"


def test_a_silent_pods_last_batch_was_lost() -> None:
    """The check brings what was published since and never came."""
    engine, told = Engine(1000), Told(told_router(), check_s=1.0)
    found = published(engine, 2)
    told.live(found[0])
    told.tick(1.1)
    told.replay(*engine.replay(0))
    assert believed_kinds(told, 0, 1) == [2, 2]
    assert "PodRestarted" not in told.kinds()


def test_recorded_restarts_leave_the_last_process() -> None:
    """Of the recorded pod that was restarted twice, only the last life's prompts are believed."""
    told = Told(told_router(block=32), block=32, can_ask=False)
    found = messages("events_bytes.jsonl", "kv@np@tiny")
    told.live(*found)
    starts = [at for at, message in enumerate(found) if message.sequence == 0]
    assert told.pod.view().restarts == len(starts) - 1 > 1
    fresh = Told(told_router(block=32), block=32, can_ask=False)
    fresh.live(*found[starts[-1] :])
    assert told.router.pods()[0].blocks == fresh.router.pods()[0].blocks > 0


def test_the_router_forgot_the_pod_and_is_told_again() -> None:
    """A refused connection makes a pod cold; if it is the same process, a replay brings it back."""
    engine, told = Engine(1000), Told(told_router())
    told.tick()
    told.replay()
    told.live(*published(engine, 2))
    told.router.observe(ProbeFailed("single-0", refused=True), told.now)
    told.router.observe(ProbeSucceeded("single-0"), told.now)
    assert believed_kinds(told, 0, 1) == [0, 0]
    told.tick()
    told.replay(*engine.replay(0))
    assert believed_kinds(told, 0, 1) == [2, 2]
    told.live(*published(engine, 1, kind=2))
    assert believed_kinds(told, 0, 1, 2) == [2, 2, 2]
    assert "PodRestarted" not in told.kinds()


def test_an_event_that_ends_a_long_silence() -> None:
    """Back after a silence too long to be trusted: what it then says counts once, not twice."""
    engine, told = Engine(2), Told(told_router())
    told.tick()
    told.replay()
    told.live(*published(engine, 1))
    told.now += 60.0
    told.live(*published(engine, 1, kind=1))
    told.tick()
    told.replay(*engine.replay(0))
    assert believed_kinds(told, 0, 1) == [0, 2]
    told.live(*published(engine, 1, kind=2))
    assert believed_kinds(told, 1, 2) == [0, 2]


def test_a_restart_that_the_router_knows_of_is_told_once() -> None:
    """The probes were first: blocks that requests left on the new process are not taken away."""
    engine, told = Engine(1000), Told(told_router())
    told.live(*published(engine, 3))
    told.router.observe(ProbeFailed("single-0", refused=True), told.now)
    told.router.observe(ProbeSucceeded("single-0"), told.now)
    engine.restart()
    told.live(*published(engine, 1, kind=9))
    told.replay(*engine.replay(0))
    assert believed_kinds(told, 0, 9) == [0, 2]
    assert "PodRestarted" not in told.kinds()


def test_ranks_are_one_pod() -> None:
    """A block is there while any rank has it; a restart of the pod is told once."""
    told = Told(told_router(), ranks=2)
    engines = [Engine(1000, rank=0), Engine(1000, rank=1)]
    for rank, engine in enumerate(engines):
        told.live(*published(engine, 1, kind=7), rank=rank)
        told.live(*published(engine, 1, kind=20 + rank), rank=rank)
    assert believed_kinds(told, 7, 20, 21) == [2, 2, 2]
    engines[0].reset()
    told.live(*published(engines[0], 1, kind=30), rank=0)
    assert believed_kinds(told, 7, 20, 21, 30) == [2, 0, 2, 2]
    for engine in engines:
        engine.restart()
    told.live(*published(engines[0], 1, kind=40), rank=0)
    told.live(*published(engines[1], 1, kind=41), rank=1)
    assert believed_kinds(told, 7, 21, 30, 40, 41) == [0, 0, 0, 2, 2]
    assert told.kinds().count("PodRestarted") == 1
    assert told.pod.view().ranks == 2


def test_the_batch_says_which_rank_it_is_of() -> None:
    """Where all ranks come by one socket, their numbers are kept apart by the rank in the batch."""
    told = Told(told_router(), ranks=2)
    engines = [Engine(1000, rank=0), Engine(1000, rank=1)]
    for kind in range(3):
        for rank, engine in enumerate(engines):
            told.live(*published(engine, 1, kind=10 * rank + kind), rank=0)
    assert believed_kinds(told, 0, 1, 2, 10, 11, 12) == [2] * 6
    assert told.pod.view().batches == [3, 3]


def test_with_text_keys_events_only_clear() -> None:
    """Blocks say nothing there; a cleared cache and a restart do."""
    engine, told = Engine(1000), Told(told_router(), clears_only=True, can_ask=False)
    told.live(*published(engine, 2))
    assert told.kinds() == []
    engine.reset()
    told.live(*published(engine, 1))
    assert told.kinds() == ["BlocksCleared"]
    engine.restart()
    told.live(*published(engine, 1))
    assert told.kinds() == ["BlocksCleared", "PodRestarted"]
    assert told.source() == "history"


def test_messages_that_cannot_be_read_are_lost_batches() -> None:
    """What is no batch is counted and leaves the stream gapped; the next one counts."""
    engine, told = Engine(1000), Told(told_router(), can_ask=False)
    told.live(Message(b"", 0, b"\xc1garbage"))
    engine.sequence = 1
    told.live(*published(engine, 1))
    view = told.pod.view()
    assert (view.source, view.unreadable, view.lost_batches) == ("gapped", 1, 1)
    assert believed_kinds(told, 0) == [2]


def test_what_waits_for_a_replay_is_bounded() -> None:
    """However much comes before the replay does, memory is bounded, and the rest is a gap."""
    told = Told(told_router())
    told.tick()
    huge = bytes(1 << 20)
    for number in range(1, 100):
        told.live(Message(b"", number, huge))
    waiting = told.pod.streams[0]._pending
    assert 0 < sum(len(message.payload) for message in waiting) <= 16 << 20
    for number in range(100, 9000):
        told.live(Message(b"", number, b"x"))
    assert len(waiting) <= 4096


def test_live_batches_do_not_wait_for_a_check() -> None:
    """While a publisher is asked whether it is still the same, what it publishes counts at once."""
    engine, told = Engine(1000), Told(told_router(), check_s=1.0)
    told.tick()
    told.replay()
    told.live(*published(engine, 2))
    told.tick(1.1)
    assert told.lines[0].asked == [0, 1]
    told.live(*published(engine, 2, kind=2))
    assert believed_kinds(told, 0, 1, 2, 3) == [2, 2, 2, 2]
    told.replay(*engine.replay(1))
    assert told.kinds().count("PodRestarted") == 0
    assert (told.source(), told.pod.view().stored) == ("events", 8)


def test_what_has_waited_counts_one_by_one() -> None:
    """After a replay the batches behind it have their turns; later ones stay behind them."""
    engine, told = Engine(1000), Told(told_router())
    first, _, *rest = published(engine, 6)
    told.tick()
    told.replay(end=False)
    told.live(first, *rest[:3])
    for answer in engine.replay(0)[:2]:
        told.pod.replayed(0, answer, told.now)
    told.pod.replayed(0, "end", told.now)
    assert believed_kinds(told, 0, 1, 2, 3, 4) == [2, 2, 0, 0, 0]
    assert told.pod.drain(told.now)
    told.live(rest[3])
    assert believed_kinds(told, 2, 3, 4, 5) == [2, 0, 0, 0]
    told.drain()
    assert believed_kinds(told, 2, 3, 4, 5) == [2, 2, 2, 2]
