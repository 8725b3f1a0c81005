"""The public service as its users meet it: every field, other people's clients, health, bad input."""

import concurrent.futures
import signal
import socket
import time

import grpc
import pytest

from api import INFERENCE, Api, grpcurl, joined
from cluster import ROOT, Cluster, golden, golden_dir, wait_until
from grpc_health.v1 import health_pb2

MODEL = "llama_gqa"
FLAGS = ["-tp", 2, "-dcp", 2, "--dtype=float32"]
PROMPT = golden(MODEL)["len33"]
STOP, LENGTH, ABORTED = 1, 2, 3


@pytest.fixture(scope="module")
def cluster():
    with Cluster(golden_dir(MODEL), *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def api(cluster):
    client = Api(cluster.address)
    yield client
    client.close()


def greedy(max_tokens=48, **sampling):
    return {"token_ids": {"ids": PROMPT["ids"]},
            "sampling": {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens, **sampling}}


def check_good(api):
    assert joined(api.generate(**greedy()))[0] == PROMPT["greedy"]


def fails(api, **fields):
    with pytest.raises(grpc.RpcError) as caught:
        api.generate(**fields)
    return api.error(caught.value)


# --- Clients that nobody here wrote.

def test_grpcurl_lists_describes_and_streams(cluster):
    assert {INFERENCE, "grpc.health.v1.Health"} <= set(grpcurl(cluster.address, "list"))
    assert any("rpc Generate" in line for line in grpcurl(cluster.address, "describe", INFERENCE))
    health = grpcurl(cluster.address, "grpc.health.v1.Health/Check", data={"service": INFERENCE})
    assert health == [{"status": "SERVING"}]
    messages = grpcurl(cluster.address, f"{INFERENCE}/Generate", data={
        "tokenIds": {"ids": PROMPT["ids"]}, "sampling": {"temperature": 0, "ignoreEos": True, "maxTokens": 48}})
    assert [i for m in messages for i in m.get("token_ids", [])] == PROMPT["greedy"]
    assert messages[-1]["finish_reason"] == "FINISH_REASON_LENGTH"
    assert "version" in grpcurl(cluster.address, f"{INFERENCE}/GetServerInfo", data={})[0]


def test_a_client_with_reflection_only_streams(api):
    messages = api.generate(request_id="mine", **greedy())
    ids, _, last = joined(messages)
    assert ids == PROMPT["greedy"] and last.finish_reason == LENGTH
    assert [m.seq for m in messages] == list(range(len(messages)))
    assert list(messages[0].prompt_token_ids) == PROMPT["ids"]
    assert all(m.request_id == "mine" and m.usage.prompt_tokens == 33 for m in messages)
    assert [m.usage.completion_tokens for m in messages][-1] == 48


def test_health_follows_load_and_drain():
    with Cluster(golden_dir(MODEL), *FLAGS, wait=False) as running:
        client = Api(running.address)
        seen = []
        watch = client.health.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        alive = client.health.Check(health_pb2.HealthCheckRequest(service=""), timeout=10)
        assert alive.status == health_pb2.HealthCheckResponse.SERVING
        try:
            for status in watch:
                seen.append(status.status)
                if status.status == health_pb2.HealthCheckResponse.SERVING:
                    running.process.send_signal(signal.SIGTERM)
        except grpc.RpcError:
            pass
        assert running.process.wait(30) == 0
        serving, not_serving = 1, 2
        changes = [s for i, s in enumerate(seen) if i == 0 or s != seen[i - 1]]
        assert changes in ([not_serving, serving, not_serving], [serving, not_serving]), seen


# --- Text.

def test_stop_strings_at_every_split_point(api):
    """Every piece of the greedy text as a stop string, against the text itself."""
    ids = PROMPT["greedy"]
    text = api.call("Detokenize", {"token_ids": ids}).text
    prefixes = [api.call("Detokenize", {"token_ids": ids[:n]}).text.rstrip("\ufffd") for n in range(len(ids) + 1)]

    def expect(stop, include):
        end = text.index(stop) + len(stop)
        return next(n for n, p in enumerate(prefixes) if len(p) >= end), text[:end if include else end - len(stop)]

    cases = [(text[at:at + size], include) for size in (1, 2, 5) for at in range(len(text) - size)
             for include in (False, True) if "\ufffd" not in text[at:at + size]]
    cases = cases[::len(cases) // 50]
    assert len(cases) >= 50, len(cases)

    def check(case):
        stop, include = case
        got = joined(api.generate(**greedy(stop=["no such thing", stop], include_stop_str_in_output=include)))
        tokens, wanted = expect(stop, include)
        assert (got[1], len(got[0])) == (wanted, tokens), case
        assert got[0] == ids[:tokens] and got[2].finish_reason == STOP and got[2].stop == stop
        assert got[2].usage.completion_tokens == tokens

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(check, cases))


def test_a_prompt_may_end_in_half_a_character(api):
    """The output is text by itself, in whole characters, whatever bytes the prompt leaves open."""
    whole = list(api.call("Tokenize", {"text": "\U0001f600 \u20ac"}).token_ids)
    cut = [whole[:n] for n in range(1, len(whole))
           if api.call("Detokenize", {"token_ids": whole[:n]}).text.endswith("\ufffd")]
    assert cut, whole
    for ids in cut:
        got = joined(api.generate(token_ids={"ids": ids}, sampling={"temperature": 0, "ignore_eos": True, "max_tokens": 12}))
        assert len(got[0]) == 12 and got[1] == api.call("Detokenize", {"token_ids": got[0]}).text


def test_chat_tokenize_detokenize_and_model_info(api):
    chat = {"messages": [{"role": 1, "content": "Be terse."}, {"role": 2, "content": "H\u00e9!"}]}
    rendered = "<|system|>Be terse.<eos><|user|>H\u00e9!<eos><|assistant|>"
    ids = list(api.call("Tokenize", {"chat": chat}).token_ids)
    assert ids == list(api.call("Tokenize", {"text": rendered}).token_ids)
    assert api.call("Detokenize", {"token_ids": ids, "skip_special_tokens": False}).text == rendered
    messages = api.generate(chat=chat, sampling={"max_tokens": 2, "temperature": 0})
    assert list(messages[0].prompt_token_ids) == ids
    info = api.call("GetModelInfo")
    assert info.text and info.chat and info.vocab_size > 0 and info.max_model_len == 512 and info.eos_token_ids


# --- Samples, resuming, aborting.

def test_min_tokens_holds_off_what_ends_the_output(api):
    ids = PROMPT["greedy"]
    at = next(i for i in range(2, 20) if ids[i] not in ids[:i])
    ended = joined(api.generate(**greedy(stop_token_ids=[ids[at]])))
    assert ended[0] == ids[:at + 1] and ended[2].finish_reason == STOP
    held = joined(api.generate(**greedy(stop_token_ids=[ids[at]], min_tokens=30)))
    assert held[0][:at] == ids[:at] and len(held[0]) >= 30 and ids[at] not in held[0][:30]


def test_a_request_id_is_free_again_at_once(api):
    for cut in (1, 2, 5) * 5:
        stream = api.call("Generate", {"request_id": "again", **greedy(470)})
        for _ in range(cut):
            next(stream)
        api.call("Abort", {"request_id": "again"})
        assert list(stream)[-1].finish_reason == ABORTED
        assert joined(api.generate(request_id="again", **greedy(8)))[0] == PROMPT["greedy"][:8]
        stopped = joined(api.generate(request_id="again", **greedy(470, stop=["e"])))
        assert stopped[2].finish_reason == STOP


def test_samples_are_independent_and_reproducible(api):
    sampling = {"temperature": 1, "max_tokens": 20, "ignore_eos": True, "seed": 5}
    prompt = {"token_ids": {"ids": PROMPT["ids"]}}
    together = api.generate(**prompt, sampling={**sampling, "n": 3})
    assert [m.seq for m in together] == list(range(len(together)))
    samples = [joined(together, i)[0] for i in range(3)]
    alone = [joined(api.generate(**prompt, sampling={**sampling, "seed": 5 + i}))[0] for i in range(3)]
    assert samples == alone and len({tuple(s) for s in samples}) == 3


def test_a_resumed_request_goes_on_after_any_message(api):
    request = greedy(24, stop=["no such thing"])
    whole = api.generate(**request)
    _, text, _ = joined(whole)
    for cut in range(0, len(whole), 5):
        ids, before = [i for m in whole[:cut] for i in m.token_ids], "".join(m.text for m in whole[:cut])
        rest = api.generate(**request, resume={"ids": ids}, resume_seq=cut)
        new_ids, new_text, last = joined(rest)
        assert ids + new_ids == PROMPT["greedy"][:24] and before + new_text == text
        assert rest[0].seq == cut and last.usage.completion_tokens == 24


def test_abort_ends_a_request_and_is_idempotent(api):
    for attempt in range(10):  # one that was faster than the abort proves nothing
        stream = api.call("Generate", {"request_id": f"long-{attempt}", **greedy(470), "priority": 1})
        messages = [next(stream)]
        for _ in range(2):
            api.call("Abort", {"request_id": f"long-{attempt}"})
        messages += list(stream)
        if joined(messages)[2].finish_reason == ABORTED:
            break
    ids, _, last = joined(messages)
    assert last.finish_reason == ABORTED and len(ids) == last.usage.completion_tokens < 470
    api.call("Abort", {"request_id": "unknown"})
    check_good(api)


def test_a_request_id_in_use_is_refused(api):
    stream = api.call("Generate", {"request_id": "twice", **greedy(470)})
    next(stream)
    error = fails(api, request_id="twice", **greedy())
    stream.cancel()
    assert error.code == grpc.StatusCode.ALREADY_EXISTS
    wait_until(lambda: not_in_use(api), 5, "the id is free")


def not_in_use(api):
    try:
        return api.generate(request_id="twice", **greedy(1))
    except grpc.RpcError:
        return None


# --- Bad input.

BAD = [
    ({"sampling": {"top_p": 0}}, "top_p"),
    ({"sampling": {"temperature": float("nan")}}, "temperature"),
    ({"sampling": {"min_p": float("nan")}}, "min_p"),
    ({"sampling": {"presence_penalty": float("inf")}}, "presence_penalty"),
    ({"sampling": {"frequency_penalty": -3}}, "frequency_penalty"),
    ({"sampling": {"repetition_penalty": 0}}, "repetition_penalty"),
    ({"sampling": {"logit_bias": {5: float("nan")}}}, "logit_bias[5]"),
    ({"sampling": {"logit_bias": {99999: 1}}}, "99999"),
    ({"sampling": {"allowed_token_ids": [-1]}}, "allowed_token_ids[0]"),
    ({"sampling": {"n": 129}}, "--max-n"),
    ({"sampling": {"logprobs": 21}}, "--max-logprobs"),
    ({"sampling": {"prompt_logprobs": -1}}, "prompt_logprobs"),
    ({"sampling": {"stop": [""]}}, "stop[0]"),
    ({"sampling": {"stop": ["x"] * 17}}, "--max-stop-strings"),
    ({"sampling": {"stop": ["x" * 1025]}}, "--max-stop-string-bytes"),
    ({"sampling": {"stop_token_ids": [1] * 129}}, "--max-stop-token-ids"),
    ({"sampling": {"bad_words": [" "]}}, "bad_words[0]"),
    ({"sampling": {"min_tokens": 17}}, "min_tokens"),
    ({"sampling": {"max_tokens": 0}}, "max_tokens"),
    ({"resume": {"ids": [1] * 16}}, "resume"),
    ({"model": "other"}, "other"),
    ({"request_id": "x" * 129}, "129"),
    ({"request_id": "a\nb"}, "request_id"),
]


@pytest.mark.parametrize("fields,mention", BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_out_of_range_values_are_named(api, fields, mention):
    error = fails(api, token_ids={"ids": [5]}, **fields)
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT and mention in error.message


def test_bytes_that_are_no_request_and_unknown_fields(api):
    request = api.message_class("weft.v1.GenerateRequest")(**greedy()).SerializeToString()
    raw = api.callable("Generate", raw=True)
    assert joined(list(raw(request + b"\xf8\x7f\x05")))[0] == PROMPT["greedy"]  # field 2047, of a later version
    for bad in (b"\xff" * 20, request[:-1] + b"\xff", b"\x1a\x02\xff\xfe"):
        with pytest.raises(grpc.RpcError) as caught:
            list(raw(bad))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    check_good(api)


def test_prompts_of_many_megabytes(api):
    for megabytes, mention in ((10, "tokens"), (17, "--max-prompt-bytes")):
        started = time.monotonic()
        error = fails(api, text="ab c" * (megabytes << 18))
        assert error.code == grpc.StatusCode.INVALID_ARGUMENT and mention in error.message
        assert time.monotonic() - started < 50
    error = fails(api, text="a" * (65 << 20))
    assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED  # the largest message
    check_good(api)


def test_half_open_connections_and_garbage_disturb_nobody(cluster, api):
    host, port = cluster.address.rsplit(":", 1)
    sockets = [socket.create_connection((host, int(port))) for _ in range(40)]
    for i, opened in enumerate(sockets):
        opened.sendall([b"", b"PRI * HT", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\xff"][i % 4])
    check_good(api)
    for opened in sockets:
        opened.close()
    check_good(api)


def test_a_slow_reader_costs_its_own_stream_only(cluster):
    slow = Api(cluster.address, [("grpc.http2.lookahead_bytes", 0)])
    streams = [slow.call("Generate", greedy(470)) for _ in range(3)]  # nobody reads
    other = Api(cluster.address)
    check_good(other)
    for stream in streams:
        stream.cancel()
    check_good(other)
    slow.close()
    other.close()


def test_a_cancel_of_a_queued_request_touches_no_running_one():
    with Cluster(golden_dir(MODEL), *FLAGS, "--max-num-seqs=1", "--max-num-waiting=8") as running:
        client = Api(running.address)
        for _ in range(3):
            first = client.call("Generate", greedy())
            queued = [client.call("Generate", greedy()) for _ in range(4)]
            messages = [next(first)]
            for i in (2, 0, 3):  # neither the first nor the last of those that wait alone
                queued[i].cancel()
            assert joined(messages + list(first))[0] == PROMPT["greedy"]
            assert joined(list(queued[1]))[0] == PROMPT["greedy"]
            wait_until(lambda: running.status()["num_requests_waiting"] == 0, 5, "nobody waits")
        client.close()


# --- Connections.

def test_an_idle_connection_serves_after_pings(tmp_path):
    with Cluster(golden_dir(MODEL), *FLAGS, "--keepalive-interval=1s", "--keepalive-timeout=1s",
                 "--min-ping-interval=500ms") as running:
        client = Api(running.address, [("grpc.keepalive_time_ms", 1000), ("grpc.keepalive_permit_without_calls", 1),
                                       ("grpc.http2.max_pings_without_data", 0)])
        check_good(client)
        time.sleep(2.5)
        check_good(client)
        client.close()


def test_a_connection_of_age_is_replaced_without_a_failed_call():
    with Cluster(golden_dir(MODEL), *FLAGS, "--max-connection-age=500ms", "--max-connection-age-grace=5s") as running:
        client = Api(running.address)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            check_good(client)
        client.close()


def test_a_drain_loses_no_status_and_says_draining():
    """Streams that end during a drain get their last status; new requests learn where to go."""
    flags = ["-tp", 2, "-dcp", 2, "--max-model-len=1K", "--kv-cache-memory-bytes=64MiB"]
    with Cluster(ROOT / "models/smollm2-135m-instruct", *flags) as running:
        client = Api(running.address)
        request = {"token_ids": {"ids": [5, 6, 7]}, "sampling": {"temperature": 0, "ignore_eos": True}}
        streams = [client.call("Generate", {**request, "sampling": {**request["sampling"], "max_tokens": 8 + i}})
                   for i in range(12)]
        first = [next(stream) for stream in streams]
        running.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not client.serving(), 5, "not ready")
        error = fails(client, **request)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING") and error.retry_seconds > 0
        for i, stream in enumerate(streams):
            ids, _, last = joined([first[i], *stream])
            assert len(ids) == 8 + i and last.finish_reason == LENGTH
            assert stream.code() == grpc.StatusCode.OK
        assert running.process.wait(60) == 0
        client.close()
