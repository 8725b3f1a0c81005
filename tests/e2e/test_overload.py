"""Groups that have more to do than they can, with real processes: who is refused, and what the others feel."""

import collections
import concurrent.futures
import json
import re
import time

import grpc
import pytest

from api import Api
from cluster import free_port, golden, golden_dir, wait_until
from test_security import Processes

MODEL = "llama_mqa"
PROMPT = golden(MODEL)["len33"]["ids"]
NUM_TOKENS = 200
NUM_GROUPS, NUM_SEQS, NUM_WAITING, NUM_QUEUED = 2, 4, 2, 4
RUNNING = NUM_GROUPS * NUM_SEQS
CAPACITY = NUM_GROUPS * (NUM_SEQS + NUM_WAITING) + NUM_QUEUED
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

Outcome = collections.namedtuple("Outcome", "code reason retry_seconds tokens tpot")


class Deployment:
    """Groups of one rank each behind one router."""

    def __init__(self, processes, num_groups=NUM_GROUPS, worker=(), router=()):
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(num_groups)]
        self.workers = [processes.start("weft-worker", "--model", golden_dir(MODEL), "--local-ranks=1",
                                        "--dtype=float32", "--threads-per-rank=1", "--metrics-port=-1",
                                        f"--max-num-seqs={NUM_SEQS}", f"--max-num-waiting={NUM_WAITING}",
                                        f"--listen={address}", *worker) for address in self.addresses]
        self.router = processes.start("weft-router", "--model", golden_dir(MODEL), "--port=0", "--metrics-port=-1",
                                      f"--groups={','.join(self.addresses)}", *router)
        self.address = processes.wait_for(self.router, r"listening on (\S+)").group(1)
        self.api = Api(self.address)
        wait_until(self.all_ready, 60, "all groups are ready")

    def all_ready(self):
        return all(group.ready for group in self.api.call("GetServerInfo").groups)


@pytest.fixture
def processes():
    started = Processes()
    yield started
    started.stop()


def ask(api, num_tokens=NUM_TOKENS):
    fields = {"token_ids": {"ids": PROMPT}, "sampling": {"temperature": 0, "ignore_eos": True, "max_tokens": num_tokens}}
    times, count = [], 0
    try:
        for message in api.call("Generate", fields):
            times.append(time.monotonic())
            count += len(message.token_ids)
    except grpc.RpcError as error:
        said = api.error(error)
        return Outcome(said.code.name, said.reason, said.retry_seconds, count, None)
    return Outcome("OK", None, None, count, (times[-1] - times[0]) / (count - 1))


def burst(api, size):
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        return [f.result() for f in [pool.submit(ask, api) for _ in range(size)]]


def p99_ms(outcomes):
    times = sorted(o.tpot for o in outcomes if o.tpot is not None)
    return 1e3 * times[min(len(times) - 1, int(0.99 * len(times)))]


def test_a_burst_of_four_times_capacity_is_served_or_refused(processes):
    deployment = Deployment(processes, router=[f"--max-queued-requests={NUM_QUEUED}"])
    burst(deployment.api, RUNNING)  # warm
    rounds = []
    for _ in range(3):
        calm = burst(deployment.api, RUNNING)
        assert all(o.code == "OK" and o.tokens == NUM_TOKENS for o in calm), calm
        busy = burst(deployment.api, 4 * CAPACITY)
        counts = collections.Counter(o.code for o in busy)
        assert counts.keys() <= {"OK", "RESOURCE_EXHAUSTED"}, counts
        for outcome in busy:
            if outcome.code == "OK":
                assert outcome.tokens == NUM_TOKENS
            else:
                assert outcome.reason == "OVERLOADED" and outcome.retry_seconds > 0 and outcome.tokens == 0, outcome
        assert counts["OK"] >= CAPACITY, counts
        assert counts["RESOURCE_EXHAUSTED"] > 0, counts
        rounds.append((p99_ms(calm), p99_ms(busy), dict(counts)))
        print(f"p99 time per output token: {rounds[-1][0]:.2f} ms with {RUNNING} requests, {rounds[-1][1]:.2f} ms of those "
              f"admitted in a burst of {4 * CAPACITY} ({rounds[-1][1] / rounds[-1][0]:.2f} times): {dict(counts)}")


def test_those_that_wait_in_the_router_are_all_served(processes):
    """One at a time in each group, and a queue for all: with no more than it, nobody is refused."""
    deployment = Deployment(processes, router=["--max-waiting-per-group=0", "--queue-timeout=60s"])
    outcomes = burst(deployment.api, 6 * RUNNING)
    assert all(o.code == "OK" and o.tokens == NUM_TOKENS for o in outcomes), collections.Counter(outcomes)


def test_the_access_log_has_a_line_for_each_call_and_the_trace_reaches_the_worker(processes):
    deployment = Deployment(processes, num_groups=1, worker=["--log-level=debug"])
    api = Api(deployment.address, metadata=[("traceparent", TRACE)])
    api.generate(request_id="traced", text="a secret prompt", sampling={"max_tokens": 3, "ignore_eos": True})
    line = processes.wait_for(deployment.router, r'\{"time".*\}').group(0)
    entry = json.loads(line)
    assert entry["request_id"] == "traced" and entry["traceparent"] == TRACE and entry["status"] == "OK"
    assert entry["completion_tokens"] == 3 and entry["group"] == deployment.addresses[0]
    processes.wait_for(deployment.workers[0], rf"request 0:traced: .*traceparent {TRACE}")
    assert "secret" not in processes.text(deployment.router) + processes.text(deployment.workers[0])


def test_the_access_log_can_be_off(processes):
    deployment = Deployment(processes, num_groups=1, router=["--no-access-log"])
    assert ask(deployment.api, 3).code == "OK"
    time.sleep(0.5)
    assert not re.search(r'^\{', processes.text(deployment.router), re.M)


def test_a_name_stands_for_the_groups_at_its_addresses(processes):
    """`localhost`, as the hosts file has it."""
    port = free_port()
    processes.start("weft-worker", "--model", golden_dir(MODEL), "--local-ranks=1", "--dtype=float32",
                    "--metrics-port=-1", f"--listen=127.0.0.1:{port}")
    router = processes.start("weft-router", "--model", golden_dir(MODEL), "--port=0", "--metrics-port=-1",
                             f"--groups=dns:///localhost:{port}", "--dns-refresh-interval=100ms")
    api = Api(processes.wait_for(router, r"listening on (\S+)").group(1))
    wait_until(lambda: any(g.ready and g.address == f"127.0.0.1:{port}" for g in api.call("GetServerInfo").groups), 60,
               "the group at 127.0.0.1 is ready")
    assert ask(api, 3).code == "OK"
    wrong = processes.start("weft-router", "--model", golden_dir(MODEL), "--port=0", "--groups=dns:///localhost")
    code, said = processes.ends(wrong)
    assert code == 78 and "nor dns:///HOST:PORT" in said, said
