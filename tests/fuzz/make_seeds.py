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

experts = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32, "decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": True}
seed("model_config_fuzzer", "qwen3_moe", json.dumps(base | experts).encode())
latent = json.loads((data / "deepseek_v2_lite" / "config.json").read_text())
grouped = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
seed("model_config_fuzzer", "deepseek_v2_group", json.dumps(latent | grouped).encode())
v3 = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "topk_method": "noaux_tc", "n_group": 4,
      "topk_group": 2, "q_lora_rank": 24, "rope_interleave": False, "rope_scaling": yarn, "rope_parameters": None}
seed("model_config_fuzzer", "deepseek_v3", json.dumps(latent | v3).encode())
window = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9,
          "max_window_layers": 1, "layer_types": ["full_attention", "sliding_attention"]}
seed("model_config_fuzzer", "window", json.dumps(base | window).encode())

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
    return struct.pack("<IIQIB3xQQ", 0x32544657, 1, connection, sequence, 2, message_bytes, 0) + payload


seed("frame_fuzzer", "in_order", pieces(frame(0, b"12345678", 8), frame(1, b"", 0)))
seed("frame_fuzzer", "early", pieces(frame(1, b"b", 1), frame(0, b"a", 1), frame(0, b"c", 1, connection=2)))
seed("frame_fuzzer", "split", pieces(frame(0, b"x" * 200, 8100), frame(1, b"y" * 200, 8100)))


def collective(round_, operation, operation_bytes, payload, offset=0):
    return struct.pack("<IIIIQQ", 7, round_, operation, 0, operation_bytes, offset) + payload


for operation in range(5):
    message = pieces(collective(0, operation, 8, b"abcdefgh")) + b"\x01"
    seed("collective_fuzzer", f"operation{operation}", bytes([16 + operation]) + message)


text_data = pathlib.Path(__file__).resolve().parent.parent / "router" / "text" / "data"
for i, case in enumerate(json.loads((text_data / "jinja_features.json").read_text())["cases"]):
    seed("chat_template_fuzzer", str(i), case["template"].encode())


def token(i, content, special):
    return {"id": i, "content": content, "single_word": False, "lstrip": True, "rstrip": False, "normalized": not special,
            "special": special}


byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
split = {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}|(?i:'s|'t)|\s+(?!\S)"}, "behavior": "Isolated", "invert": False}
vocab = ["a", "b", "t", "h", "e", "\u0120", "ab", "th", "the", "\u0120the", "1", "2"]
tokenizer = {
    "version": "1.0", "added_tokens": [token(12, "<a>", True), token(13, "don", False)], "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True}, split, byte_level]},
    "post_processor": {"type": "TemplateProcessing", "single": [
        {"SpecialToken": {"id": "<a>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [], "special_tokens": {"<a>": {"id": "<a>", "ids": [12], "tokens": ["<a>"]}}},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {v: i for i, v in enumerate(vocab)}, "unk_token": "a", "fuse_unk": True,
              "ignore_merges": True, "merges": ["a b", ["t", "h"], "th e", "\u0120 the"]}}
seed("tokenizer_fuzzer", "all", json.dumps(tokenizer).encode())
seed("tokenizer_fuzzer", "plain", json.dumps(tokenizer | {
    "added_tokens": [], "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None}).encode())


def field(number, value):
    """One field of a protobuf message: int, float, or bytes, text and messages."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value % 2**64)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


# kv_message.cc: a byte says whose connection it is, then a message with its length in front.
def kv(type_, payload=b"", transfer=0, layer=0, positions=(0, 0), heads=(0, 0), rank=0, to_sender=0):
    message = struct.pack("<IBBHQQqqQiiiI", 0x564b4657, 1, type_, layer, 1, transfer, *positions, 0, rank, *heads,
                          len(payload)) + payload
    return bytes([to_sender, len(message)]) + message


def greeting(tensor_parallel_size, decode_context_parallel_size, block_size, interleave, rank=0):
    return kv(1, field(1, b"kv") + field(2, tensor_parallel_size) + field(3, decode_context_parallel_size) +
              field(4, block_size) + field(5, interleave) + field(6, b"there"), rank=rank)


# Of 16 positions the receiver owns 8, of 12 bytes each; 4 of them are the second sender's, too.
rows = [kv(3, bytes(96), 7, layer, (0, 16), (0, 1)) for layer in range(2)]
seed("kv_message_fuzzer", "whole", greeting(1, 1, 8, 8) + rows[0] + rows[1] + rows[1])
seed("kv_message_fuzzer", "part", greeting(2, 2, 8, 1, 1) + kv(3, b"r" * 48, 7, 1, (0, 16), (0, 1)))
seed("kv_message_fuzzer", "taken", kv(2, to_sender=1) + kv(4, transfer=8, to_sender=1) * 3 + kv(5, transfer=8, to_sender=1))
seed("kv_message_fuzzer", "offer", greeting(1, 1, 8, 8) + kv(2, transfer=1, to_sender=1) +
     kv(6, struct.pack("<QQ", 4096, 160), 7, 0, (0, 16), (0, 1)) + kv(4, transfer=8, to_sender=1))
seed("kv_message_fuzzer", "refused", kv(2, b"no", to_sender=1) + greeting(3, 2, 8, 2))


sampling = b"".join([
    field(1, 20), field(2, 0.5), field(3, 0.9), field(4, 5), field(5, 7), field(6, bytes([1, 2])), field(7, 1), field(8, 0.1),
    field(9, 1.0), field(10, -1.0), field(11, 1.2), field(12, 3), field(13, field(1, 5) + field(2, 2.0)), field(14, bytes([3])),
    field(15, field(1, bytes([4, 5]))), field(16, 2), field(17, 0), field(18, 2), field(19, b"STOP"), field(19, b"a b"),
    field(20, 1), field(21, 0), field(22, b"bad")])
text = "abc \u00e9\u20ac a ST STOP".encode()
seed("generate_request_fuzzer", "all", field(1, b"id") + field(3, text) + field(5, sampling) + field(6, 2**64 - 1))
seed("generate_request_fuzzer", "resume", field(3, text) + field(5, field(19, b"STO")) + field(7, field(1, bytes([97, 98]))) +
     field(9, 3))
seed("generate_request_fuzzer", "ids", field(4, field(1, bytes([1, 2, 3]))))
seed("generate_request_fuzzer", "chat", field(8, field(1, field(1, 2) + field(2, b"hi"))))
