"""Writes a Hugging Face model directory of the sizes asked for, with random weights.

    make_model.py OUT_DIR [--num-key-value-heads 1] [--hidden-size 576] ...

The defaults are SmolLM2-135M's sizes. There is no tokenizer: serve it with --skip-tokenizer-init. What it says
means nothing, what it costs is what a trained model of these sizes costs.
"""

import argparse
import json
import pathlib
import struct
import sys

import numpy as np

DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}
INITIALIZER_RANGE = 0.02
CHUNK = 1 << 22  # values drawn at a time


def tensors(c):
    """(name, shape) of every tensor of a Llama checkpoint."""
    hidden, width = c["hidden_size"], c["intermediate_size"]
    q = c["num_attention_heads"] * c["head_dim"]
    kv = c["num_key_value_heads"] * c["head_dim"]
    yield "model.embed_tokens.weight", [c["vocab_size"], hidden]
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", [hidden]
        yield f"{layer}.self_attn.q_proj.weight", [q, hidden]
        yield f"{layer}.self_attn.k_proj.weight", [kv, hidden]
        yield f"{layer}.self_attn.v_proj.weight", [kv, hidden]
        yield f"{layer}.self_attn.o_proj.weight", [hidden, q]
        yield f"{layer}.post_attention_layernorm.weight", [hidden]
        yield f"{layer}.mlp.gate_proj.weight", [width, hidden]
        yield f"{layer}.mlp.up_proj.weight", [width, hidden]
        yield f"{layer}.mlp.down_proj.weight", [hidden, width]
    yield "model.norm.weight", [hidden]
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", [c["vocab_size"], hidden]


def to_bytes(values, dtype):
    if dtype == "float32":
        return values.tobytes()
    bits = values.view("<u4")  # to the nearest, ties to even
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_weights(config, seed, path):
    code, item_bytes = DTYPES[config["torch_dtype"]]
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors(config):
        end = offset + int(np.prod(shape)) * item_bytes
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(seed)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors(config):
            left = int(np.prod(shape))
            while left > 0:
                count = min(left, CHUNK)
                left -= count
                values = (np.ones(count, "<f4") if name.endswith("norm.weight") else
                          random.standard_normal(count, np.float32) * np.float32(INITIALIZER_RANGE))
                out.write(to_bytes(values, config["torch_dtype"]))
    return offset


def make_config(args):
    heads, kv_heads = args.num_attention_heads, args.num_key_value_heads
    if heads % kv_heads != 0:
        sys.exit(f"make_model: --num-key-value-heads is {kv_heads}; it has to divide --num-attention-heads, {heads}")
    head_dim = args.head_dim or args.hidden_size // heads
    if head_dim % 2 != 0 or head_dim == 0:
        sys.exit(f"make_model: the head dimension is {head_dim}; an even one is needed (--head-dim)")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": args.hidden_size,
        "initializer_range": INITIALIZER_RANGE,
        "intermediate_size": args.intermediate_size,
        "max_position_embeddings": args.max_position_embeddings,
        "num_attention_heads": heads,
        "num_hidden_layers": args.num_hidden_layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": not args.untied,
        "torch_dtype": args.dtype,
        "vocab_size": args.vocab_size,
    }


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    for name, default in [("hidden-size", 576), ("intermediate-size", 1536), ("num-hidden-layers", 30),
                          ("num-attention-heads", 9), ("num-key-value-heads", 3), ("vocab-size", 49152),
                          ("max-position-embeddings", 8192)]:
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--head-dim", type=positive, help="hidden size / heads if absent")
    parser.add_argument("--untied", action="store_true", help="an lm_head of its own")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = make_config(args)
    args.out.mkdir(parents=True, exist_ok=True)
    num_bytes = write_weights(config, args.seed, args.out / "model.safetensors")
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{args.out}: {num_bytes / DTYPES[args.dtype][1] / 1e6:.1f} M weights as {args.dtype}")


if __name__ == "__main__":
    main()
