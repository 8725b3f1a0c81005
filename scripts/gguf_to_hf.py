"""Turns a GGUF file of the Llama family into a Hugging Face model directory.

    gguf_to_hf.py MODEL.gguf OUT_DIR [--dtype bfloat16|float32]

Quantized tensors are dequantized. Only what SmolLM2 needs is supported: anything else in the file
(another architecture, tokenizer or tensor) is an error, never a guess.
"""

import argparse
import json
import pathlib
import struct
import sys

import gguf
import numpy as np

TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
CONTROL_TOKEN = 3
DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}


class Metadata:
    """The key-value part of a GGUF file."""

    def __init__(self, reader):
        self._fields = reader.fields

    def get(self, key, default=None):
        return self._fields[key].contents() if key in self._fields else default

    def need(self, key):
        if key not in self._fields:
            raise ValueError(f"the GGUF file has no {key}")
        return self._fields[key].contents()


def hf_name(name):
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    layer = ""
    part = name
    if name.startswith("blk."):
        _, index, part = name.split(".", 2)
        layer = f"model.layers.{int(index)}."
    if part not in TENSOR_NAMES:
        raise ValueError(f"do not know tensor {name}")
    return layer + TENSOR_NAMES[part]


def unpermute(rows, num_heads):
    """Undoes what GGUF's converter does to q and k: in each head the two halves of the rotary
    dimensions are interleaved, [d/2, 2], where Hugging Face keeps them apart, [2, d/2]."""
    num_rows, width = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(num_rows, width)


def to_bytes(values, dtype):
    if not np.isfinite(values).all():
        raise ValueError("a weight is not finite")
    if dtype == "float32":
        return values.astype("<f4").tobytes()
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    # Round to nearest, ties to even.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def load_tensor(tensor, metadata):
    values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    values = values.reshape([int(n) for n in reversed(tensor.shape)])
    if tensor.name.endswith("attn_q.weight"):
        return unpermute(values, metadata.need("llama.attention.head_count"))
    if tensor.name.endswith("attn_k.weight"):
        return unpermute(values, metadata.need("llama.attention.head_count_kv"))
    return values


def write_safetensors(reader, metadata, dtype, path):
    code, item_bytes = DTYPES[dtype]
    header = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        end = offset + int(np.prod(shape)) * item_bytes
        header[hf_name(tensor.name)] = {
            "dtype": code,
            "shape": shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)))
        out.write(text)
        for tensor in reader.tensors:
            out.write(to_bytes(load_tensor(tensor, metadata), dtype))


def make_config(metadata, tied, dtype):
    heads = metadata.need("llama.attention.head_count")
    hidden = metadata.need("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": metadata.need("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.need("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": metadata.need("llama.feed_forward_length"),
        "max_position_embeddings": metadata.need("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": metadata.need("llama.block_count"),
        "num_key_value_heads": metadata.need("llama.attention.head_count_kv"),
        # The file holds float32; seven digits give back the number that was meant (1e-05).
        "rms_norm_eps": float(f"{metadata.need('llama.attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_scaling": None,
        "rope_theta": metadata.need("llama.rope.freq_base"),
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": metadata.need("llama.vocab_size"),
    }


def make_tokenizer(metadata):
    """Byte-level BPE as the `smollm` pre-tokenizer wants it: digits one by one, then GPT-2's."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokens = metadata.need("tokenizer.ggml.tokens")
    types = metadata.need("tokenizer.ggml.token_type")
    special = [i for i, kind in enumerate(types) if kind == CONTROL_TOKEN]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": tokens[i],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i in special
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": metadata.need("tokenizer.ggml.merges"),
        },
    }


def make_tokenizer_config(metadata):
    tokens = metadata.need("tokenizer.ggml.tokens")

    def token(kind):
        index = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return None if index is None else tokens[index]

    return {
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", False),
        "add_prefix_space": False,
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "chat_template": metadata.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.need("llama.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def check(metadata):
    for key, allowed in {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }.items():
        if metadata.need(key) != allowed:
            raise ValueError(f"{key} is {metadata.need(key)}; only {allowed} is supported")
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        raise ValueError("tokenizer.ggml.add_bos_token is set: not supported")


def convert(source, out, dtype):
    reader = gguf.GGUFReader(source)
    metadata = Metadata(reader)
    check(metadata)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = make_config(metadata, tied, dtype)
    generation_config = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "config.json": config,
        "generation_config.json": generation_config,
        "tokenizer.json": make_tokenizer(metadata),
        "tokenizer_config.json": make_tokenizer_config(metadata),
    }.items():
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        (out / name).write_text(text, encoding="utf-8")
    write_safetensors(reader, metadata, dtype, out / "model.safetensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    args = parser.parse_args()
    try:
        convert(args.source, args.out, args.dtype)
    except (OSError, ValueError) as error:
        sys.exit(f"gguf_to_hf: {args.source}: {error}")


if __name__ == "__main__":
    main()
