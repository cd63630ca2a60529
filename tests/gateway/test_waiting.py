"""The wait queue: order, bound, deadline, and nobody waits behind those whose pods are full."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from calinix.gateway.waiting import WaitQueue


class Pods:
    """Free places by wait key, and who got one."""

    def __init__(self, **free: int):
        self.free = Counter(free)
        self.served: list[Waiting] = []
        self.asked = 0


class Waiting:
    """A request that wants a place of its key."""

    def __init__(self, pods: Pods, key: str, name: int = 0):
        self.pods = pods
        self.wait_key = key
        self.name = name
        self.given_up = False

    def try_again(self, now: float) -> bool:
        """Takes a place if there is one."""
        self.pods.asked += 1
        if not self.pods.free[self.wait_key]:
            return False
        self.pods.free[self.wait_key] -= 1
        self.pods.served.append(self)
        return True

    def give_up_waiting(self) -> None:
        """Too late."""
        self.given_up = True


def queue_of(pods: Pods, *keys: str, timeout_s: float = 5.0) -> tuple[WaitQueue, list[Waiting]]:
    """A queue with a waiter for each key, in this order, one a second from 0 on."""
    queue = WaitQueue(max_requests=10_000, timeout_s=timeout_s)
    waiters = [Waiting(pods, key, name) for name, key in enumerate(keys)]
    for waiter in waiters:
        assert queue.add(waiter, float(waiter.name))
    return queue, waiters


def names(waiters: list[Waiting]) -> list[int]:
    """In the order given."""
    return [waiter.name for waiter in waiters]


def test_first_come_first_served() -> None:
    """Places go to the longest waiting; who finds none goes on waiting, in the same order."""
    pods = Pods(a=2)
    queue, _ = queue_of(pods, "a", "a", "a", "a")
    queue.wake(4.0)
    assert names(pods.served) == [0, 1]
    pods.free["a"] = 1
    queue.wake(4.0)
    assert names(pods.served) == [0, 1, 2]
    assert len(queue) == 1


def test_one_refusal_speaks_for_all_of_its_key() -> None:
    """Where one finds no room, the others that want the same are not asked."""
    pods = Pods()
    queue, _ = queue_of(pods, *"aaaaaaaaaa")
    assert not queue.wake(10.0)
    assert pods.asked == 1


def test_the_longest_waiting_of_all_keys_goes_first() -> None:
    """Between keys too it is the time of waiting that counts."""
    pods = Pods(a=2, b=2)
    queue, _ = queue_of(pods, *"babaab")
    queue.wake(6.0)
    assert names(pods.served) == [0, 1, 2, 3]


def test_a_full_key_hides_nobody() -> None:
    """However many wait for full pods, one behind them that has a place is served at once."""
    pods = Pods(free=1)
    queue, _ = queue_of(pods, *["full"] * 1000, "free")
    queue.wake(1001.0)
    assert names(pods.served) == [1000]


def test_many_full_keys_hide_nobody_for_long() -> None:
    """With more full keys than one wake-up asks, the others take turns behind the oldest."""
    pods = Pods()
    keys = [f"full-{number}" for number in range(200)]
    queue, _ = queue_of(pods, *keys, "free")
    pods.free["free"] = 1
    wakes = 0
    while not pods.served:
        queue.wake(201.0)
        wakes += 1
        assert wakes <= 30
    assert pods.asked <= 16 * wakes


def test_a_wake_up_is_bounded_and_says_when_there_is_more() -> None:
    """Many places at once are given out in steps, so that no step holds up everything else."""
    pods = Pods(a=100)
    queue, _ = queue_of(pods, *["a"] * 40)
    steps = 1
    while queue.wake(40.0):
        steps += 1
        assert len(pods.served) <= 16 * steps
    assert names(pods.served) == list(range(40))
    assert steps == 3
    assert len(queue) == 0


def test_waits_end_at_their_deadline() -> None:
    """Who has waited for `timeout_s` is told so, once, and no place is offered any more."""
    pods = Pods(a=9)
    queue, waiters = queue_of(pods, *"aaaa", timeout_s=5.0)
    queue.sweep(4.999)
    assert len(queue) == 4
    queue.sweep(6.0)
    assert [waiter.given_up for waiter in waiters] == [True, True, False, False]
    queue.wake(6.0)
    assert names(pods.served) == [2, 3]


def test_the_queue_is_bounded() -> None:
    """Nobody is added beyond the bound; who leaves makes room; 0 means that nobody waits."""
    pods = Pods()
    queue = WaitQueue(max_requests=2, timeout_s=1.0)
    first, second, third = (Waiting(pods, "a", name) for name in range(3))
    assert queue.add(first, 0.0)
    assert queue.add(second, 0.0)
    assert not queue.add(third, 0.0)
    queue.remove(first)
    assert queue.add(third, 0.0)
    assert len(queue) == 2
    queue.max_requests = 0
    assert not queue.add(first, 0.0)


def test_who_has_left_is_not_asked() -> None:
    """A client that leaves is forgotten; forgetting it again, or a stranger, is harmless."""
    pods = Pods(a=3)
    queue, waiters = queue_of(pods, *"aba")
    queue.remove(waiters[0])
    queue.remove(waiters[0])
    queue.remove(Waiting(pods, "z"))
    queue.wake(3.0)
    assert names(pods.served) == [2]
    assert len(queue) == 1
    queue.sweep(99.0)
    assert [waiter.given_up for waiter in waiters] == [False, True, False]


class QueueMachine(RuleBasedStateMachine):
    """The queue beside a plain list, under any order of what can happen to it."""

    @initialize(bound=st.integers(0, 40))
    def begin(self, bound: int) -> None:
        """An empty queue."""
        self.now = 0.0
        self.pods = Pods()
        self.queue = WaitQueue(bound, timeout_s=10.0)
        self.model: dict[Waiting, float] = {}

    @rule(key=st.integers(0, 30))
    def arrive(self, key: int) -> None:
        """One more waits, if there is room."""
        waiter = Waiting(self.pods, str(key))
        assert self.queue.add(waiter, self.now) == (len(self.model) < self.queue.max_requests)
        if len(self.model) < self.queue.max_requests:
            self.model[waiter] = self.now + 10.0

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A client goes away."""
        waiter = data.draw(st.sampled_from(list(self.model)))
        self.queue.remove(waiter)
        del self.model[waiter]

    @rule(after_s=st.floats(0.0, 12.0))
    def time_passes(self, after_s: float) -> None:
        """Those whose deadline has passed give up, and only those."""
        self.now += after_s
        self.queue.sweep(self.now)
        late = [waiter for waiter, deadline_s in self.model.items() if deadline_s <= self.now]
        for waiter in late:
            assert waiter.given_up
            del self.model[waiter]
        assert not any(waiter.given_up for waiter in self.model)

    @rule(key=st.integers(0, 30), places=st.integers(1, 20))
    def places_free(self, key: int, places: int) -> None:
        """Served are those of this key, first come first, as far as the places go."""
        wanted = [waiter for waiter in self.model if waiter.wait_key == str(key)][:places]
        self.pods.free = Counter({str(key): places})
        self.pods.served.clear()
        for _ in range(30):  # as many wake-ups as it takes: keys take turns
            self.queue.wake(self.now)
        assert self.pods.served == wanted
        for waiter in wanted:
            del self.model[waiter]

    @invariant()
    def counts(self) -> None:
        """Nobody is lost and nobody is counted twice."""
        assert len(self.queue) == len(self.model)


TestQueueMachine = QueueMachine.TestCase
