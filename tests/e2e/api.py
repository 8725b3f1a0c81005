"""A client that knows nothing of Weft but what the server's reflection says, as others would write it."""

import collections
import json
import subprocess
import sys

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cluster import ROOT

GRPCURL = ROOT / ".venv/bin/grpcurl"
INFERENCE = "weft.v1.Inference"
Error = collections.namedtuple("Error", "code message reason retry_seconds")


def channel_options(options):
    return [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 256 << 20), *options]


class Api:
    """One channel to a router. Requests are dicts, as in JSON; answers are messages."""

    def __init__(self, address, options=(), credentials=None, metadata=(), service=INFERENCE):
        """`metadata` goes with each call of the service."""
        options = channel_options(options)
        self.channel = (grpc.secure_channel(address, credentials, options) if credentials
                        else grpc.insecure_channel(address, options))
        self.metadata = metadata
        self.database = ProtoReflectionDescriptorDatabase(self.channel)
        self.pool = descriptor_pool.DescriptorPool(self.database)
        self.service = self.pool.FindServiceByName(service)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def close(self):
        self.channel.close()

    def message_class(self, name):
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(name))

    def callable(self, name, raw=False):
        method = self.service.FindMethodByName(name)
        request = message_factory.GetMessageClass(method.input_type)
        response = message_factory.GetMessageClass(method.output_type)
        make = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        call = make(f"/{self.service.full_name}/{name}", request_serializer=None if raw else request.SerializeToString,
                    response_deserializer=response.FromString)
        return call if raw else (lambda fields, **options: call(request(**fields), metadata=self.metadata, **options))

    def call(self, name, fields=None, **options):
        return self.callable(name)(fields or {}, timeout=60, **options)

    def generate(self, **fields):
        """All messages."""
        return list(self.call("Generate", fields))

    def error(self, error):
        """What an RpcError says, details included."""
        details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
        reason, retry = None, None
        if details:
            for any_ in self.message_class("google.rpc.Status").FromString(details).details:
                kind = any_.type_url.rpartition("/")[2]
                detail = self.message_class(kind).FromString(any_.value)
                if kind == "google.rpc.ErrorInfo":
                    assert detail.domain == "weft"
                    reason = detail.reason
                elif kind == "google.rpc.RetryInfo":
                    retry = detail.retry_delay.seconds + detail.retry_delay.nanos / 1e9
        return Error(error.code(), error.details(), reason, retry)

    def serving(self, service=INFERENCE):
        response = self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        return response.status == health_pb2.HealthCheckResponse.SERVING


def joined(messages, index=0):
    """(token ids, text, last message) of one sample."""
    mine = [m for m in messages if m.index == index]
    return [i for m in mine for i in m.token_ids], "".join(m.text for m in mine), mine[-1]


def grpcurl(address, *arguments, data=None):
    """The JSON values that the real grpcurl prints, or its lines when it lists something."""
    flags = ["-plaintext", *(["-d", json.dumps(data)] if data is not None else [])]
    out = subprocess.run([sys.executable, GRPCURL, *flags, address, *arguments], capture_output=True, text=True,
                         timeout=60)
    assert out.returncode == 0, out.stderr
    if data is None:
        return out.stdout.splitlines()
    values, decoder, text = [], json.JSONDecoder(), out.stdout.lstrip()
    while text:
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:].lstrip()
    return values
