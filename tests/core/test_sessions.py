"""Sessions and pins: bounded, with a time to live, and ending with the pod's epoch."""

from __future__ import annotations

from calinix.config import Sessions as SessionsConfig
from calinix.core.events import PodRestarted, ResponseStored
from calinix.core.pods import PodTable
from calinix.core.sessions import Pins, Sessions
from routing import ask, finish, make_config, make_router, pod_config, serve


def table_of(count: int = 3) -> PodTable:
    """A table with so many single pods."""
    table = PodTable(8)
    for number in range(count):
        table.place(pod_config(f"p{number}"), "single")
    return table


def test_a_session_remembers_its_last_pod() -> None:
    """The newest pod of the role; other roles and tenants are not touched."""
    table = table_of()
    one, two, _ = (pod for pod in table.at[:3] if pod)
    sessions = Sessions(table, 10, 60.0)
    sessions.remember((b"", "k"), one, None, 0.0)
    sessions.remember((b"", "k"), two, None, 1.0)
    assert sessions.last((b"", "k"), "single", 2.0) is two
    assert sessions.last((b"", "k"), "decode", 2.0) is None
    assert sessions.last((b"tenant", "k"), "single", 2.0) is None


def test_dispatch_keeps_a_pod_per_role() -> None:
    """Prefill and decode pods are remembered apart; a re-picked decode keeps the prefill pod."""
    table = PodTable(8)
    prefill = table.place(pod_config("p"), "prefill")
    decode = table.place(pod_config("d"), "decode")
    other = table.place(pod_config("e"), "decode")
    sessions = Sessions(table, 10, 60.0)
    sessions.remember((b"", "k"), decode, prefill, 0.0)
    sessions.remember((b"", "k"), other, None, 1.0)
    assert sessions.last((b"", "k"), "prefill", 1.0) is prefill
    assert sessions.last((b"", "k"), "decode", 1.0) is other


def test_the_table_is_bounded_least_recently_used_first() -> None:
    """One session over the bound drops the one that was used longest ago."""
    table = table_of()
    pod = table.at[0]
    assert pod is not None
    sessions = Sessions(table, 2, 60.0)
    for key in ("a", "b", "a", "c"):
        sessions.remember((b"", key), pod, None, 0.0)
    assert len(sessions) == 2
    assert sessions.last((b"", "b"), "single", 0.0) is None
    assert sessions.last((b"", "a"), "single", 0.0) is pod
    nobody = Sessions(table, 0, 60.0)
    nobody.remember((b"", "a"), pod, None, 0.0)
    assert len(nobody) == 0


def test_sessions_time_out() -> None:
    """After the time to live a session is not known, and sweeping forgets it."""
    table = table_of()
    pod = table.at[0]
    assert pod is not None
    sessions = Sessions(table, 1000, 60.0)
    for number in range(200):
        sessions.remember((b"", str(number)), pod, None, float(number))
    assert sessions.last((b"", "0"), "single", 61.0) is None
    for _ in range(4):
        sessions.sweep(160.5)
    assert len(sessions) == 99


def test_a_session_ends_with_the_epoch() -> None:
    """After a restart the pod holds nothing of the session any more."""
    table = table_of()
    pod = table.at[0]
    assert pod is not None
    sessions = Sessions(table, 10, 60.0)
    sessions.remember((b"", "k"), pod, None, 0.0)
    table.renew(pod)
    assert sessions.last((b"", "k"), "single", 0.0) is None


def test_pins_are_bounded_and_end() -> None:
    """Pins go by bound, age and epoch."""
    table = table_of()
    pod, other = table.at[0], table.at[1]
    assert pod is not None
    assert other is not None
    pins = Pins(table, 2, 60.0)
    for number in range(3):
        pins.remember(f"resp_{number}", pod, float(number))
    assert pins.find("resp_0", 3.0) is None
    assert pins.find("resp_2", 3.0) is pod
    pins.remember("resp_1", other, 3.0)
    assert pins.find("resp_2", 62.5) is None
    assert pins.find("resp_1", 62.5) is other
    pins.sweep(62.5)
    assert len(pins) == 1
    table.renew(other)
    assert pins.find("resp_1", 62.5) is None


def test_the_router_follows_sessions() -> None:
    """Where nothing else speaks, a session stays where it was; after a restart it is free."""
    router = make_router(make_config(4))
    home = serve(router, session_key="s")
    assert {serve(router, session_key="s") for _ in range(10)} == {home}
    assert len({serve(router, session_key=str(n)) for n in range(30)}) > 1
    router.observe(PodRestarted(home), 1.0)
    assert len({serve(router, session_key=f"x{n}") for n in range(30)}) > 1
    found = {serve(router, session_key="s")}
    assert {serve(router, session_key="s") for _ in range(10)} == found


def test_sessions_can_be_switched_off() -> None:
    """MaxSessions 0 remembers nobody."""
    router = make_router(make_config(4, sessions=SessionsConfig(max_sessions=0)))
    assert len({serve(router, session_key="s") for _ in range(30)}) == 4


def test_stored_responses_have_an_owner() -> None:
    """The pod that answered can be asked for by response id, until it is another process."""
    router = make_router(make_config(2))
    plan = ask(router)
    finish(router, plan)
    router.observe(ResponseStored("resp_1", plan.pod.id), 1.0)
    router.observe(ResponseStored("resp_2", "nobody"), 1.0)
    assert router.response_owner("resp_1", 2.0) == plan.pod.id
    assert router.response_owner("resp_2", 2.0) is None
    router.observe(PodRestarted(plan.pod.id), 3.0)
    assert router.response_owner("resp_1", 3.0) is None
