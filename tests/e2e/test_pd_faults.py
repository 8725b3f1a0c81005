"""Everything that can go wrong while a prompt is handed over, with real processes. Whatever it is: the tokens of the
streams that survive are the reference's, every block comes back, nothing hangs.

WEFT_PD_SEED draws the timing and, without WEFT_PD_ALL, which of the cases run; scripts/soak.sh pd repeats it.
"""

import contextlib
import itertools
import os
import signal
import time

import grpc
import pytest

from cluster import alive, children, wait_until
from pd_rig import LEASE_SECONDS, LONG, SHORT, Harm, Rig, draw, kv_failure, nothing_leaked, quiet, reserved, some

CODE = grpc.StatusCode
GREEDY = LONG["greedy"]


@pytest.fixture(scope="module")
def shared():
    with Rig(num_routers=2) as rig:
        yield rig


@pytest.fixture
def rig(shared):
    shared.wait_whole()
    yield shared
    shared.wait_whole()


# --- through the router


def reach(stream, phase, timing):
    """Waits until a stream is in a phase, and some time that is drawn."""
    if phase == "transfer":
        stream.wait_tokens(1)
    elif phase == "decode":
        stream.wait_tokens(2)
    time.sleep(timing.uniform(0, {"compute": 0.3, "transfer": 2, "decode": 0.02}[phase]))


COMBINATIONS = itertools.product(["kv_producer", "kv_consumer"], [0, 1], ["compute", "transfer", "decode"],
                                 ["kill", "pause"])
PHASES = ["compute", "transfer", "decode"]


@pytest.mark.parametrize("role,rank,phase,harm", some(COMBINATIONS, 3))
def test_a_rank_of_either_side_is_killed_or_paused_in_any_phase(rig, role, rank, phase, harm):
    """A pause may be longer than a lease, and than the router's patience; the blocks go to others meanwhile."""
    timing = draw(role, rank, phase, harm)
    tree = children(rig.groups[role].process.pid)
    streams = [rig.start(LONG), rig.start(SHORT)]
    reach(streams[0], phase, timing)
    if harm == "kill":
        Harm(rig, role, rank).kill()
    else:
        Harm(rig, role, rank).pause(timing.uniform(0.2, 5),
                                    lambda: streams.extend(rig.start(SHORT) for _ in range(3)))
    assert streams[0].end() == GREEDY
    for stream in streams[1:]:
        assert stream.end() == SHORT["greedy"]
    rig.wait_whole()
    nothing_leaked(pid for pid in tree if not alive(pid))


@pytest.mark.parametrize("phase", some(PHASES, 1))
def test_a_client_leaves_in_any_phase(rig, phase):
    timing = draw("leaves", phase)
    leaver, stayer = rig.start(LONG), rig.start(LONG)
    reach(leaver, phase, timing)
    leaver.cancel()
    assert stayer.end() == GREEDY


def test_a_transfer_that_fails_after_the_first_token_costs_no_token(rig):
    failed = rig.handoffs("failed")
    stream = rig.start(LONG)
    stream.wait_tokens(1)
    Harm(rig, "kv_producer", draw("first token").randrange(2)).kill()
    told = len(stream.ids)
    assert stream.end() == GREEDY
    assert told > 1 or rig.handoffs("failed") == failed + 1
    rig.wait_whole()


@pytest.mark.parametrize("phase", some(PHASES, 1))
def test_a_router_dies_between_the_legs(rig, phase):
    """Both groups hear of it from their connections; its clients go on at another router."""
    timing = draw("router", phase)
    other = rig.start(LONG, router=1)
    stream = rig.start(LONG)
    reach(stream, phase, timing)
    os.kill(rig.routers[0].process.pid, signal.SIGKILL)
    ids = stream.ids
    assert stream.end() in (CODE.UNAVAILABLE, GREEDY)
    if ids != GREEDY:
        assert ids == GREEDY[:len(ids)]
        more = {"resume": {"ids": ids}, "resume_seq": len(stream.messages)} if ids else {}
        assert ids + rig.start(LONG, router=1, **more).end() == GREEDY
    assert other.end() == GREEDY
    rig.routers[0].process.wait(10)
    rig.routers[0].keep_running()


@pytest.mark.parametrize("role", some(["kv_producer", "kv_consumer"], 1))
def test_a_group_is_started_again_at_the_same_address(rig, role):
    """All its processes at once: connections, transfers and addresses of the old ones are of no use."""
    stream = rig.start(LONG)
    reach(stream, "transfer", draw("restart", role))
    process = rig.groups[role].process
    tree = children(process.pid)
    for pid in [process.pid, *tree]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(10)
    wait_until(lambda: not any(map(alive, tree)), 10, "its ranks are gone")
    rig.groups[role].keep_running()
    assert stream.end() == GREEDY
    rig.wait_whole()
    done = rig.handoffs("done")

    def handed_over():  # not to a group whose breaker is open still
        assert rig.start(LONG).end() == GREEDY
        return rig.handoffs("done") > done
    wait_until(handed_over, 30, "prompts are handed over again")


def test_without_a_prefill_group_the_decode_group_serves(rig):
    group = rig.groups["kv_producer"]
    assert group.process.poll() is None
    group.process.send_signal(signal.SIGKILL)
    group.process.wait(10)
    wait_until(lambda: not all(g.ready for g in rig.info().groups), 30, "the router knows")
    assert rig.start(LONG).end() == GREEDY
    group.keep_running()
    rig.wait_ready()


def test_a_full_pool_makes_requests_wait_and_nothing_else():
    """Neither pool holds two of the requests."""
    with Rig(prefill=["--num-gpu-blocks-override=12"], decode=["--num-gpu-blocks-override=12"]) as rig:
        prompts = [LONG, SHORT, SHORT, LONG]
        assert [s.end(120) for s in [rig.start(p) for p in prompts]] == [p["greedy"] for p in prompts]
        rig.wait_whole()


@pytest.mark.parametrize("flag,names", some([("--kv-cache-dtype=float16", ["float16 of", "float32 of"]),
                                             ("--dtype=bfloat16", ["in bfloat16", "in float32"])], 1))
def test_groups_of_different_kv_are_not_paired(flag, names):
    with Rig(prefill=[flag]) as rig:
        assert rig.start(LONG).end() == GREEDY
        assert rig.handoffs("done") == rig.handoffs("failed") == 0
        log = rig.log_of("router0")
        assert all(name in log for name in names), "it says why"
        rig.wait_whole()


# --- what a router that is late, dead or wrong does to the groups


class Legs:
    """Both legs of one request, driven by hand."""

    def __init__(self, rig, name, prompt=LONG):
        self.decode, self.prefill = rig.leader("kv_consumer"), rig.leader("kv_producer")
        self.name, self.prompt, self.endpoint = name, prompt, self.decode.endpoint()
        self.receiver = self.decode.receive(name, prompt, self.endpoint["format"])

    def send(self, endpoint=None, **target):
        """The prefill leg, and the one that it sends to."""
        kept = reserved(self.receiver)
        target = {"transfer_id": kept.transfer_id, "first_position": kept.first_position,
                  "endpoint": endpoint or self.endpoint} | target
        self.sender = self.prefill.generate(self.name, self.prompt, kv_send=target)
        return self.sender

    def go_on(self, **more):
        self.decode.continue_kv(self.name, self.receiver.attempt, **more)

    def close(self):
        for stream in (self.receiver, getattr(self, "sender", None)):
            if stream is not None:
                stream.cancel()
        self.decode.close()
        self.prefill.close()


@pytest.fixture
def legs(rig, request):
    both = Legs(rig, request.node.name)
    yield both
    both.close()


def sending(legs):
    """Has the first token, and most of the KV still to come."""
    sender = legs.send()
    sender.wait_tokens(1)
    time.sleep(draw(legs.name).uniform(0, 0.5))
    return sender


def test_the_legs_together_give_the_references_tokens(legs):
    sender = legs.send()
    sender.wait_tokens(1)
    legs.go_on(first_token=sender.ids[0])
    legs.go_on(first_token=sender.ids[0])  # said twice
    assert sender.end() == GREEDY[:1]
    assert legs.receiver.end() == GREEDY[1:]
    assert kv_failure(legs.receiver) == ""


def test_decode_is_aborted_while_prefill_sends(rig, legs):
    dropped = rig.metric("weft_kv_transfer_dropped_messages_total")
    sender = sending(legs)
    legs.receiver.cancel()
    # Its blocks go to another one, whose KV what still comes must not touch.
    other = rig.leader("kv_consumer").generate("in its blocks", LONG)
    assert sender.end() == CODE.UNAVAILABLE
    assert "given the transfer up" in sender.error.details()
    assert other.end() == GREEDY
    assert rig.metric("weft_kv_transfer_dropped_messages_total") > dropped


def test_prefill_is_aborted_while_it_sends(legs):
    sender = sending(legs)
    legs.go_on(first_token=sender.ids[0])
    sender.cancel()
    assert legs.receiver.end() == GREEDY[1:]
    assert f"no progress for {LEASE_SECONDS}s" in kv_failure(legs.receiver)


def test_decode_is_told_that_prefill_failed(legs):
    sender = sending(legs)
    legs.go_on(failure="for a test")
    assert legs.receiver.end() == GREEDY
    assert kv_failure(legs.receiver) == "for a test"
    assert sender.end() == CODE.UNAVAILABLE


def test_nobody_sends_what_was_reserved(legs):
    """A router that dies before the second leg, and whose connection nobody sees end."""
    reserved(legs.receiver)
    assert legs.receiver.end() == GREEDY
    assert "no progress" in kv_failure(legs.receiver)


def test_the_word_to_go_on_is_lost(legs):
    """All the KV is there; nobody says the first token."""
    sender = legs.send()
    assert sender.end() == GREEDY[:1]
    assert legs.receiver.end() == GREEDY
    assert "no progress" in kv_failure(legs.receiver)


def test_the_word_to_go_on_comes_for_another_attempt_or_too_late(legs):
    with pytest.raises(grpc.RpcError) as error:
        legs.decode.continue_kv(legs.name, legs.receiver.attempt + 1, first_token=1)
    assert error.value.code() == CODE.NOT_FOUND
    reserved(legs.receiver)
    legs.receiver.wait(kv_failure, "its lease expires")
    with contextlib.suppress(grpc.RpcError):  # it may have ended
        legs.go_on(first_token=(GREEDY[0] + 1) % 100)  # would be wrong
    assert legs.receiver.end() == GREEDY


def test_a_lease_expires_while_prefill_is_queued():
    """One sequence at a time on the prefill side: the second one's lease is over before its turn comes."""
    with Rig(prefill=["--max-num-seqs=1"]) as slow:
        first, second = Legs(slow, "first"), Legs(slow, "second")
        sender = first.send()
        sender.wait_tokens(1)
        first.go_on(first_token=sender.ids[0])
        late = second.send()
        assert second.receiver.end() == GREEDY
        assert "no progress" in kv_failure(second.receiver)
        assert first.receiver.end() == GREEDY[1:]
        # It starts to send after all, to a transfer that nobody knows any more.
        assert late.end() == CODE.UNAVAILABLE
        first.close()
        second.close()
        slow.wait_whole()


def test_decode_rejects_before_admission():
    """Its queue is full: no prefill starts for whom it rejects; they wait in the router, or are told so."""
    with Rig(decode=["--max-num-seqs=1", "--max-num-waiting=1"]) as rig:
        streams = [rig.start(SHORT) for _ in range(6)]
        ends = [s.end() for s in streams]
        rejected = ends.count(CODE.RESOURCE_EXHAUSTED)
        assert ends.count(SHORT["greedy"]) == 6 - rejected
        rig.wait_whole()


def test_prefill_rejects():
    """Its queue is full: decode computes what prefill does not take, whether it is asked or known to be full."""
    with Rig(prefill=["--max-num-seqs=1", "--max-num-waiting=1"]) as rig:
        assert [s.end() for s in [rig.start(SHORT) for _ in range(6)]] == [SHORT["greedy"]] * 6
        assert rig.handoffs("done") < 6
        rig.wait_whole()


def test_an_endpoint_of_an_earlier_life_is_refused(rig, legs):
    """The generation of a peer is in its addresses: what was reserved in one is not sent to the next."""
    kept, old = reserved(legs.receiver), legs.endpoint
    Harm(rig, "kv_consumer", draw("earlier life").randrange(2)).kill()
    assert legs.receiver.end() == CODE.UNAVAILABLE
    addresses = lambda endpoint: endpoint.get("fabric_addresses")  # none while it loads

    def of_new_life():
        endpoint = rig.leader("kv_consumer").endpoint()
        return endpoint if addresses(endpoint) not in (None, addresses(old)) else None
    new = wait_until(lambda: quiet(of_new_life), 30, "it is back, at other addresses")
    sender = legs.prefill.generate("old", LONG, kv_send={"transfer_id": kept.transfer_id, "endpoint": old})
    assert sender.end() == CODE.UNAVAILABLE
    # Its addresses are right, its transfer is the old one's.
    # Who is slow to accept a connection, on a busy machine, is a lost peer at first.
    for attempt in range(5):
        sender = legs.prefill.generate(f"mixed-{attempt}", LONG,
                                       kv_send={"transfer_id": kept.transfer_id, "endpoint": new})
        assert sender.end() == CODE.UNAVAILABLE
        if "lost the peer" not in sender.error.details():
            break
    assert "given the transfer up" in sender.error.details()


def test_kv_of_another_model_is_refused_with_the_reason(rig, legs):
    other = legs.endpoint["format"].replace("float32 of", "float16 of")
    refused = legs.decode.receive("other", LONG, other)
    assert refused.end() == CODE.FAILED_PRECONDITION
    assert other in refused.error.details() and legs.endpoint["format"] in refused.error.details()
    sender = legs.send(endpoint=legs.endpoint | {"format": other})
    assert sender.end() == CODE.FAILED_PRECONDITION
    assert other in sender.error.details()
    # A layout that is a lie: what the receiver gets cannot be right, and it says so.
    legs.send(endpoint=legs.endpoint | {"cp_kv_cache_interleave_size": 1})
    assert legs.sender.end() == CODE.UNAVAILABLE
    legs.go_on(failure="the prefill group failed")
    assert legs.receiver.end() == GREEDY
