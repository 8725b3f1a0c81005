#!/usr/bin/env python3
"""Writes OUT/<fuzzer>/: valid inputs for the fuzzers to start from.   make_seeds.py DATA_DIR OUT"""
import json
import pathlib
import struct
import sys

data, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])


def seed(fuzzer, name, content):
    (out / fuzzer).mkdir(parents=True, exist_ok=True)
    (out / fuzzer / name).write_bytes(content)


def safetensors(header, size):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


seed("safetensors_fuzzer", "two", safetensors(
    {"__metadata__": {"format": "pt"}, "a": tensor("F32", [2, 3], 0, 24), "b": tensor("BF16", [4], 24, 32)}, 32))
seed("safetensors_fuzzer", "odd", safetensors({"s": tensor("F4", [4], 0, 2), "e": tensor("I64", [0], 2, 2)}, 2))

for config in data.glob("*/config.json"):
    seed("model_config_fuzzer", config.parent.name, config.read_bytes())
base = json.loads((data / "llama_gqa" / "config.json").read_text())
yarn = {"type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7,
        "attention_factor": 1.1, "truncate": False, "original_max_position_embeddings": 64}
del base["rope_parameters"]
seed("model_config_fuzzer", "yarn", json.dumps(base | {"rope_scaling": yarn, "eos_token_id": [2, 3]}).encode())

# step_plan.cc: header, previous tokens, sampling deltas, table deltas, blocks, sequences, token ids.
plan = struct.pack("<IIQ6I", 0x54464557, 1, 7, 2, 1, 1, 2, 2, 4)
plan += struct.pack("<2i", 5, 6)
plan += struct.pack("<iffiQ", 3, 0.5, 0.9, 10, 42)
plan += struct.pack("<3i", 3, 0, 2) + struct.pack("<2i", 11, 12)
plan += struct.pack("<iiqi", 3, 3, 0, 1) + struct.pack("<iiqi", 4, 1, 9, 1)
plan += struct.pack("<4i", 1, 2, 3, -2)
seed("step_plan_fuzzer", "mixed", plan)
seed("step_plan_fuzzer", "empty", struct.pack("<IIQ6I", 0x54464557, 1, 1, 0, 0, 0, 0, 0, 0))


# Pieces with their length in front: frame_assembler.h, collective_mux.h.
def pieces(*contents):
    return b"".join(bytes([len(c)]) + c for c in contents)


def frame(sequence, payload, message_bytes, connection=1):
    return struct.pack("<IIQIB3xQ", 0x31544657, 1, connection, sequence, 2, message_bytes) + payload


seed("frame_fuzzer", "in_order", pieces(frame(0, b"12345678", 8), frame(1, b"", 0)))
seed("frame_fuzzer", "early", pieces(frame(1, b"b", 1), frame(0, b"a", 1), frame(0, b"c", 1, connection=2)))
seed("frame_fuzzer", "split", pieces(frame(0, b"x" * 200, 8100), frame(1, b"y" * 200, 8100)))


def collective(round_, operation, operation_bytes, payload, offset=0):
    return struct.pack("<IIIIQQ", 7, round_, operation, 0, operation_bytes, offset) + payload


for operation in range(5):
    message = pieces(collective(0, operation, 8, b"abcdefgh")) + b"\x01"
    seed("collective_fuzzer", f"operation{operation}", bytes([16 + operation]) + message)
