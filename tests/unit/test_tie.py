# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rules of the tie (docs/decisions/0009-the-tie.md) without sockets: tables for what is promised, and any order of events."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_run_shard import run_shard

SILENT = 20.0
RESTART = run_shard.Restart(3, 600.0, (2.0, 10.0, 30.0))
TYING, RUNNING, ENDING, GIVEN_UP = run_shard.TYING, run_shard.RUNNING, run_shard.ENDING, run_shard.GIVEN_UP
Cause, Report = run_shard.Cause, run_shard.Report
IDLE = Report(None, None, None)


def leader(nodes=3, number=0, restart=RESTART):
    ids = (f"{count:x}" for count in itertools.count(0xA0))
    one = run_shard.Leader(nodes, restart, SILENT, lambda: next(ids), 0.0, number)
    one.own_idle(0.0)
    return one


def tied(nodes=3):
    one = leader(nodes)
    for rank in range(1, nodes):
        assert one.join(rank, IDLE, 0, 0.0) is None
    return one


def engine_end(rank=0):
    return Cause(rank, run_shard.LAUNCH, "engine vllm ended with exit code 1", "vllm", 1)


def all_idle(one, now):
    """Every rank reports that its part of the present run is over."""
    run = one.run
    one.own_idle(now)
    for rank in sorted(one.heard):
        one.report(rank, Report(None, run.id, None), now)


# -- rank 0


def test_a_run_starts_when_the_last_rank_is_tied_and_not_before():
    one = leader()
    assert one.phase == TYING and sorted(one.missing) == [1, 2]
    one.join(2, IDLE, 0, 5.0)
    assert one.phase == TYING and sorted(one.missing) == [1]
    one.join(1, IDLE, 0, 6.0)
    assert (one.phase, one.run.number, one.busy) == (RUNNING, 1, {0, 1, 2})


def test_nothing_starts_while_our_own_old_processes_live():
    one = run_shard.Leader(1, RESTART, SILENT, lambda: "aa", 0.0)
    one.tick(1.0)
    assert one.phase == TYING
    one.own_idle(2.0)
    assert one.phase == RUNNING


def test_the_number_of_a_run_is_above_every_one_that_any_rank_has_seen():
    one = leader(nodes=3, number=4)
    one.join(1, IDLE, 17, 0.0)
    one.join(2, IDLE, 3, 0.0)
    assert one.run.number == 18
    terms = run_shard.TieTerms("127.0.0.1", 1, "k", 1.0, tuple(range(29500, 29510)))
    assert [terms.port_of_run(number) for number in (1, 18, 20, 21)] == [29500, 29507, 29509, 29500]


@pytest.mark.parametrize(
    ("event", "rank", "kind", "part"),
    [
        (lambda one: one.own_ended(engine_end(), 9.0), 0, "launch", "exit code 1"),
        (lambda one: one.report(1, Report("a0", "a0", engine_end(1)), 9.0), 1, "launch", "exit code 1"),
        (lambda one: one.report(2, Report("a0", "a0", engine_end(0)), 9.0), 2, "launch", "exit code 1"),  # a rank speaks for itself only
        (lambda one: one.report(1, Report(None, "a0", None), 9.0), 1, "tie", "ended its part"),
        (lambda one: one.lost(2, "its run_shard.py has ended the connection", 9.0), 2, "tie", "ended the connection"),
        (lambda one: one.join(1, IDLE, 1, 9.0), 1, "tie", "came back without its run"),
        (lambda one: one.tick(20.5), 1, "tie", "silent for more than 20 seconds"),
    ],
)
def test_what_ends_a_run_on_all_ranks(event, rank, kind, part):
    one = tied()
    event(one)
    assert one.phase == ENDING
    assert (one.cause.rank, one.cause.kind) == (rank, kind) and part in one.cause.reason
    assert one.message()["cause"]["rank"] == rank and one.message()["phase"] == ENDING


def test_a_rank_that_was_asked_to_stop_is_not_started_with_again():
    one = tied(nodes=2)
    stop = Cause(1, run_shard.STOP, "SIGTERM received")
    one.report(1, Report("a0", "a0", stop), 1.0)
    one.own_idle(1.1)
    one.report(1, Report(None, "a0", stop), 1.2)
    assert one.phase == TYING and one.missing[1][1] == "it was asked to stop"


@pytest.mark.parametrize(
    "event",
    [
        lambda one: one.tick(19.9),
        lambda one: one.report(1, Report("a0", "a0", None), 9.0),
        lambda one: one.report(1, IDLE, 9.0),  # sent before the start arrived there
        lambda one: one.report(1, Report(None, "9f", engine_end(1)), 9.0),  # speaks of the run before
        lambda one: one.report(7, Report(None, "a0", engine_end(7)), 9.0),  # no rank of ours
        lambda one: one.join(1, Report("a0", "a0", None), 1, 9.0),  # the same run over another connection
        lambda one: one.lost(7, "never seen", 9.0),
    ],
)
def test_what_does_not_end_a_run(event):
    one = tied()
    event(one)
    assert (one.phase, one.cause) == (RUNNING, None)


@pytest.mark.parametrize("stale", ["9f", "a1"])
def test_a_stale_run_is_refused(stale):
    one = tied()
    assert f"its run {stale} is over" in one.join(1, Report(stale, stale, None), 1, 1.0)
    assert one.phase == RUNNING
    assert leader().join(1, Report("a0", "a0", None), 0, 1.0) == "its run a0 is over"


def test_the_next_run_waits_for_every_rank_to_be_idle_and_for_the_pause():
    one = tied()
    one.own_ended(engine_end(), 100.0)
    one.own_idle(100.1)
    assert one.message()["released"]
    one.heard = {1: 100.2, 2: 110.0}
    one.report(1, Report(None, "a0", None), 100.2)
    one.tick(110.0)
    assert one.phase == ENDING, "rank 2 still runs"
    one.report(2, Report(None, "a0", None), 110.0)
    assert (one.phase, one.run.id, one.run.number) == (RUNNING, "a1", 2)
    one.own_ended(engine_end(), 111.0)
    all_idle(one, 111.1)
    one.tick(120.9)
    assert one.phase == TYING, "the second pause is 10 seconds from the end"
    one.heard = dict.fromkeys(one.heard, 121.0)
    one.tick(121.0)
    assert one.phase == RUNNING


def fail(one, now, cause):
    one.own_ended(cause, now)
    all_idle(one, now)
    for rank in one.heard:
        one.heard[rank] = now + 60
    one.tick(now + 60)


def test_the_limit_of_failed_runs_is_final():
    one = tied()
    fail(one, 0.0, engine_end())
    fail(one, 100.0, engine_end())
    assert one.phase == RUNNING
    fail(one, 200.0, engine_end())
    assert one.phase == GIVEN_UP and len(one.failures) == 3
    assert one.message()["phase"] == GIVEN_UP and one.message()["cause"]["reason"] == "engine vllm ended with exit code 1"
    one.tick(1e6)
    assert one.phase == GIVEN_UP


def test_failures_further_apart_than_the_window_never_reach_the_limit():
    one = tied()
    for count in range(10):
        fail(one, count * 301.0, engine_end())
        assert one.phase == RUNNING, count


def test_lost_ranks_do_not_count():
    """A flapping network or a host that reboots must not use up the limit: nothing can start before the rank is back anyway."""
    one = tied(nodes=2)
    for count in range(20):
        now = count * 5.0
        one.lost(1, "it was silent", now)
        assert one.phase == ENDING
        one.own_idle(now)
        one.join(1, IDLE, 0, now + 0.1)
        one.tick(now + 2.0)
        assert one.phase == RUNNING, count
    assert one.failures == []


def test_a_stop_starts_nothing_again():
    one = tied(nodes=2)
    one.own_ended(Cause(0, run_shard.STOP, "SIGTERM received"), 1.0)
    all_idle(one, 1.0)
    one.tick(19.0)
    assert one.phase == TYING and one.message()["released"]


def test_a_rank_that_resumes_while_the_run_is_being_ended_is_told():
    one = tied(nodes=2)
    one.own_ended(engine_end(), 1.0)
    assert one.join(1, Report("a0", "a0", None), 1, 2.0) is None
    assert one.message()["phase"] == ENDING and one.busy == {0, 1}


# -- the others


def running(now=0.0):
    one = run_shard.Follower(1, SILENT, 30.0, now)
    one.welcome(now)
    one.receive(state(RUNNING, "a0", 7), now)
    assert (one.phase, one.run.id, one.run.number, one.number) == (RUNNING, "a0", 7, 7)
    return one


def state(phase, run=None, number=0, cause=None, released=False, failures=0, **more):
    return {
        "type": "state",
        "phase": phase,
        "run": run,
        "number": number,
        "cause": cause and cause.as_message(),
        "released": released,
        "failures": failures,
        "tied": [0, 1],
        **more,
    }


def test_a_follower_ends_when_told_and_stops_after_rank_0():
    one = running()
    one.receive(state(ENDING, "a0", 7, engine_end(2)), 5.0)
    assert one.phase == ENDING and one.cause == engine_end(2)
    assert not one.may_stop(34.9) and one.may_stop(35.0), "at the latest after its own stop_seconds"
    one.receive(state(ENDING, "a0", 7, engine_end(2), released=True), 6.0)
    assert one.may_stop(6.0)
    one.own_idle(7.0)
    assert one.phase == TYING and one.message() == {"type": "state", "run": None, "seen": "a0", "cause": engine_end(2).as_message()}


@pytest.mark.parametrize(
    "event",
    [
        lambda one: one.lost("its run_shard.py has ended the connection", 5.0),
        lambda one: one.tick(20.1),
        lambda one: one.receive(state(TYING, None, 7), 5.0),
        lambda one: one.receive(state(RUNNING, "b0", 8), 5.0),
    ],
)
def test_a_follower_ends_its_run_with_the_tie_and_need_not_wait(event):
    one = running()
    event(one)
    assert one.phase == ENDING and one.cause.rank == 0 and one.cause.kind == "tie" and one.may_stop(20.1)
    assert not one.wants_connection(100.0), "first it ends what runs"
    one.own_idle(101.0)
    assert one.wants_connection(101.0)


def test_a_connection_that_only_fails_is_made_again_within_the_same_run():
    one = running()
    one.dropped()
    assert one.phase == RUNNING and one.wants_connection(0.1) and one.message()["run"] == "a0"
    one.tick(19.0)
    one.welcome(19.5)
    one.tick(39.0)
    assert one.phase == RUNNING


def test_a_quiet_tie_is_tried_beside():
    one = running()
    assert not one.wants_connection(4.9) and one.wants_connection(5.1)


def test_the_same_run_is_not_begun_twice():
    one = running()
    one.own_ended(engine_end(1), 1.0)
    one.own_idle(1.5)
    one.receive(state(RUNNING, "a0", 7), 2.0)  # rank 0 has not heard of it yet
    assert one.phase == TYING and one.message()["cause"]["code"] == 1
    one.receive(state(RUNNING, "a1", 8), 3.0)
    assert one.run.id == "a1" and one.message()["cause"] is None


def test_a_run_that_was_over_before_it_arrived_is_not_waited_for():
    """Found by the world below: rank 0 must not wait for ever for a rank that never began."""
    one = run_shard.Follower(1, SILENT, 30.0, 0.0)
    one.welcome(0.0)
    one.receive(state(ENDING, "a0", 7, engine_end(2)), 1.0)
    assert one.phase == TYING and one.message()["seen"] == "a0" and one.message()["run"] is None


def test_given_up_reaches_the_others():
    one = running()
    one.receive(state(ENDING, "a0", 7, engine_end(0), released=True), 1.0)
    one.own_idle(1.0)
    one.receive(state(GIVEN_UP, None, 7, engine_end(0), failures=3), 2.0)
    assert (one.phase, one.failures, one.cause) == (GIVEN_UP, 3, engine_end(0))


@pytest.mark.parametrize(
    "message",
    [
        {},
        state("dancing"),
        state(RUNNING, "not hex", 1),
        state(RUNNING, "a1", -1),
        state(RUNNING, "a1", 2**48),
        state(RUNNING, "a1", "1"),
        state(RUNNING, ["a1"], 1),
        {**state(ENDING, "a0", 7), "cause": {"rank": "0"}},
        {**state(ENDING, "a0", 7), "cause": "x"},
        {**state(ENDING, "a0", 7), "cause": {"rank": 0, "reason": 7}},
    ],
)
def test_a_state_that_cannot_be_is_refused(message):
    one = running()
    with pytest.raises(run_shard.TieError):
        one.receive(message, 1.0)
    assert one.phase == RUNNING


# -- any order of events


class World:
    """Rank 0 and its followers over lossy, ordered connections. Processes exist as a set of run ids on each rank."""

    def __init__(self, nodes):
        self.now = 0.0
        self.nodes = nodes
        ids = (f"{count:x}" for count in itertools.count(1))
        self.new_leader = lambda number: run_shard.Leader(nodes, run_shard.Restart(4, 600.0, (1.0,)), SILENT, lambda: next(ids), self.now, number)
        self.leader = self.new_leader(0)
        self.followers = {rank: run_shard.Follower(rank, SILENT, 5.0, self.now) for rank in range(1, nodes)}
        self.processes = dict.fromkeys(range(nodes))  # rank -> run id of its living processes
        self.wires = {}  # rank -> ([to rank 0], [to the rank]); a cut wire holds its lines
        self.cut = set()

    def rules(self, rank):
        return self.leader if rank == 0 else self.followers[rank]

    def check(self):
        """Ranks that are tied never have processes of different runs."""
        held = {self.processes[rank] for rank in [0, *self.leader.heard] if self.processes[rank] and (rank == 0 or self.followers[rank].tied)}
        assert len(held) <= 1, (held, self.leader.phase)

    def step(self, seconds=0.5):
        self.now += seconds
        for rank in range(self.nodes):
            rules = self.rules(rank)
            rules.tick(self.now)
            if rules.phase == RUNNING and self.processes[rank] is None:
                self.processes[rank] = rules.run.id
            elif rules.phase == ENDING and rules.may_stop(self.now):
                self.processes[rank] = None
                rules.own_idle(self.now)
            elif rules.phase == TYING and rank == 0 and 0 in rules.busy:
                rules.own_idle(self.now)
            self.check()
        for rank, follower in self.followers.items():
            self.talk(rank, follower)
            self.check()

    def talk(self, rank, follower):
        if rank not in self.cut:
            if follower.wants_connection(self.now):
                self.wires.pop(rank, None)
                message = follower.message()
                if self.leader.join(rank, Report.read(message), follower.number, self.now) is None:
                    follower.welcome(self.now)
                    self.wires[rank] = ([], [])
                elif follower.phase == RUNNING:
                    follower.lost("refused", self.now)
            elif follower.tied and rank in self.leader.heard and rank in self.wires:
                up, down = self.wires[rank]
                up.append(follower.message())
                down.append(self.leader.message())
                while up:
                    self.leader.report(rank, Report.read(up.pop(0)), self.now)
                while down:
                    follower.receive(down.pop(0), self.now)
            elif follower.tied:
                follower.lost("the connection was closed", self.now)
        elif rank in self.wires and follower.tied and rank in self.leader.heard:
            self.wires[rank][0].append(follower.message())
            self.wires[rank][1].append(self.leader.message())

    def engine_dies(self, rank):
        if self.processes[rank] is not None and self.rules(rank).phase == RUNNING:
            self.rules(rank).own_ended(engine_end(rank), self.now)

    def supervisor_dies(self, rank):
        """The kernel takes its processes with it; a new one is there at once."""
        self.processes[rank] = None
        if rank == 0:
            self.leader = self.new_leader(self.leader.number)
            for other, follower in self.followers.items():
                if other not in self.cut and follower.tied:
                    follower.lost("ended", self.now)
        else:
            self.followers[rank] = run_shard.Follower(rank, SILENT, 5.0, self.now, self.followers[rank].number)
            if rank not in self.cut and self.wires.pop(rank, None):
                self.leader.lost(rank, "ended", self.now)


EVENTS = st.one_of(
    st.tuples(st.just("engine"), st.integers(0, 2)),
    st.tuples(st.just("supervisor"), st.integers(0, 2)),
    st.tuples(st.just("cut"), st.integers(1, 2)),
    st.tuples(st.just("heal"), st.integers(1, 2)),
    st.tuples(st.just("wait"), st.integers(1, 60)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=25))
def test_in_any_order_of_events_runs_never_mix_and_all_is_well_or_given_up_in_the_end(events):
    world = World(3)
    for kind, value in events:
        if kind == "engine":
            world.engine_dies(value)
        elif kind == "supervisor":
            world.supervisor_dies(value)
        elif kind == "cut":
            world.cut.add(value)
        elif kind == "heal":
            world.cut.discard(value)
        for dummy in range(value if kind == "wait" else 1):
            world.step()
    world.cut.clear()
    for dummy in range(200):
        world.step()
    if world.leader.phase == GIVEN_UP:
        assert len(world.leader.failures) == 4
        assert all(follower.phase == GIVEN_UP for follower in world.followers.values()) and not any(world.processes.values())
    else:
        assert world.leader.phase == RUNNING
        assert set(world.processes.values()) == {world.leader.run.id}


def test_the_property_can_fail():
    """Without the leader's wait for idle ranks the world above must notice."""
    world = World(3)
    for dummy in range(10):
        world.step()
    assert world.leader.phase == RUNNING
    world.processes[1] = "ff"
    with pytest.raises(AssertionError):
        world.check()


# -- lines


KEY = b"k" * 64


def test_only_the_right_key_context_and_text_open_a_line():
    line = run_shard.sealed(KEY, [b"hello", b"n1"], {"b": 1, "a": "ü"})[:-1]
    assert run_shard.opened(KEY, [b"hello", b"n1"], line) == {"a": "ü", "b": 1}
    for key, context, text in (
        (b"x" * 64, [b"hello", b"n1"], line),
        (KEY, [b"hello", b"n2"], line),
        (KEY, [b"hellon", b"1"], line),
        (KEY, [b"hello", b"n1"], line[:-1] + b" }"),
        (KEY, [b"hello", b"n1"], b""),
        (KEY, [b"hello", b"n1"], b"{}"),
    ):
        with pytest.raises(run_shard.TieError, match="wrong secret"):
            run_shard.opened(key, context, text)


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff", b"[" * 3000, b"7", b'{"a":1}x'])
def test_a_right_mac_on_nonsense_is_no_message(text):
    line = run_shard.mac(KEY, b"x", text).hex().encode() + b" " + text
    with pytest.raises(run_shard.TieError, match="no message"):
        run_shard.opened(KEY, [b"x"], line)


def test_nothing_of_a_session_can_be_replayed():
    ours, theirs = (run_shard.Session(KEY, b"l" * 32, b"f" * 32, is_leader) for is_leader in (True, False))
    first, second = ours.seal({"n": 1})[:-1], ours.seal({"n": 2})[:-1]
    assert theirs.open(first) == {"n": 1} and theirs.open(second) == {"n": 2}
    with pytest.raises(run_shard.TieError):
        theirs.open(second)  # again
    with pytest.raises(run_shard.TieError):
        ours.open(first)  # to its sender
    other = run_shard.Session(KEY, b"l" * 32, b"g" * 32, False)
    with pytest.raises(run_shard.TieError):
        other.open(first)  # on another connection


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=2000), st.text(max_size=2000), st.integers(0, 255))
def test_the_longest_message_fits_a_line(reason, launch, ranks):
    one = run_shard.Leader(1, RESTART, SILENT, lambda: "f" * 12, 0.0)
    one.cause = Cause(ranks, run_shard.LAUNCH, reason, launch, 255, "SIGKILL")
    one.heard = dict.fromkeys(range(1, ranks + 1), 0.0)
    assert len(run_shard.Session(KEY, b"l", b"f", True).seal(one.message())) <= run_shard.MOST_LINE_BYTES
