"""Small checkpoints with positions for long contexts, and a forward pass of them that owes Weft nothing.

Weights are drawn so that attention picks few keys out of many: with the usual ones it is the mean of all, and
a key that is lost would not be seen. As a program: long_models.py DIR gqa|mla|mqa writes a checkpoint.
"""

import json
import pathlib
import sys

import numpy as np

HIDDEN, HEADS, VOCAB, MLP = 64, 8, 96, 64
LAYERS = {"gqa": 2, "mla": 2, "mqa": 1}
THETA = 1e6
COMMON = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "vocab_size": VOCAB,
          "intermediate_size": MLP, "max_position_embeddings": 1 << 18, "rms_norm_eps": 1e-6, "hidden_act": "silu",
          "tie_word_embeddings": False, "dtype": "float32", "rope_parameters": {"rope_type": "default", "rope_theta": THETA}}
LATENT, NOPE, ROPE, VALUE, HEAD = 32, 16, 8, 16, 16


def config_of(kind):
    common = {**COMMON, "num_hidden_layers": LAYERS[kind]}
    if kind == "mla":
        return {**common, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
                "q_lora_rank": None, "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE,
                "v_head_dim": VALUE, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
                "n_shared_experts": 1, "first_k_dense_replace": LAYERS[kind]}
    return {**common, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": HEAD,
            "num_key_value_heads": {"gqa": 2, "mqa": 1}[kind]}


def tensors_of(kind, seed=1):
    rng = np.random.default_rng(seed)
    config = config_of(kind)
    tensors = {}

    def linear(name, out, inner, gain=1.0):
        tensors[name + ".weight"] = (rng.standard_normal((out, inner)) * gain / np.sqrt(inner)).astype(np.float32)

    def norm(name, size):
        tensors[name + ".weight"] = (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    linear("model.embed_tokens", VOCAB, HIDDEN, 8)
    linear("lm_head", VOCAB, HIDDEN, 3)
    norm("model.norm", HIDDEN)
    for layer in range(LAYERS[kind]):
        at = f"model.layers.{layer}."
        norm(at + "input_layernorm", HIDDEN)
        norm(at + "post_attention_layernorm", HIDDEN)
        if kind == "mla":
            linear(at + "self_attn.q_proj", HEADS * (NOPE + ROPE), HIDDEN, 2.2)
            linear(at + "self_attn.kv_a_proj_with_mqa", LATENT + ROPE, HIDDEN, 2.2)
            norm(at + "self_attn.kv_a_layernorm", LATENT)
            linear(at + "self_attn.kv_b_proj", HEADS * (NOPE + VALUE), LATENT, 2.2)
            linear(at + "self_attn.o_proj", HIDDEN, HEADS * VALUE)
        else:
            kv = config["num_key_value_heads"] * HEAD
            linear(at + "self_attn.q_proj", HEADS * HEAD, HIDDEN, 2.2)
            linear(at + "self_attn.k_proj", kv, HIDDEN, 2.2)
            linear(at + "self_attn.v_proj", kv, HIDDEN, 2)
            linear(at + "self_attn.o_proj", HIDDEN, HEADS * HEAD)
        linear(at + "mlp.gate_proj", MLP, HIDDEN)
        linear(at + "mlp.up_proj", MLP, HIDDEN)
        linear(at + "mlp.down_proj", HIDDEN, MLP)
    return tensors


def write(directory, kind, seed=1):
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(kind)))
    tensors = tensors_of(kind, seed)
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            out.write(tensor.tobytes())
    return directory


def normed(x, weight, eps=1e-6):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotated(x, positions, interleaved):
    """x: [tokens, heads, dim]. Angles in float32, as the reference has them."""
    half = x.shape[-1] // 2
    inv = (1.0 / THETA ** (np.arange(half, dtype=np.float32) * 2 / np.float32(2 * half))).astype(np.float32)
    angle = positions.astype(np.float32)[:, None] * inv
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    out = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return out  # halves either way: dot products are the same


def attend(q, k, v, rows, scale):
    """q: [len(rows), heads, d] at positions `rows`; k, v: [tokens, kv heads, d]; causal."""
    per_kv = q.shape[1] // k.shape[1]
    out = np.empty((q.shape[0], q.shape[1], v.shape[2]))
    for begin in range(0, len(rows), 128):
        part = rows[begin:begin + 128]
        seen = part[-1] + 1
        hidden = np.arange(part[0], seen)[None, :] > part[:, None]  # all rows see what is before
        for head in range(q.shape[1]):
            scores = q[begin:begin + 128, head] @ k[:seen, head // per_kv].T * scale
            scores[:, part[0]:][hidden] = -np.inf
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            out[begin:begin + 128, head] = scores @ v[:seen, head // per_kv] / scores.sum(axis=1, keepdims=True)
    return out


def forward(kind, ids, sampled, seed=1):
    """Log-probabilities of the whole vocabulary after each of the ascending positions `sampled`."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors_of(kind, seed).items()}
    config = config_of(kind)
    every = np.arange(len(ids))
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(LAYERS[kind]):
        at = f"model.layers.{layer}."
        rows = sampled if layer == LAYERS[kind] - 1 else every  # what the last layer's other rows hold, nobody reads
        h = normed(x, w[at + "input_layernorm.weight"])
        project = lambda name, inputs: inputs @ w[at + f"self_attn.{name}.weight"].T
        if kind == "mla":
            q = project("q_proj", h[rows]).reshape(len(rows), HEADS, NOPE + ROPE)
            q = np.concatenate([q[..., :NOPE], rotated(q[..., NOPE:], rows, True)], axis=-1)
            latent = project("kv_a_proj_with_mqa", h)
            c = normed(latent[:, :LATENT], w[at + "self_attn.kv_a_layernorm.weight"])
            key = rotated(latent[:, None, LATENT:], every, True)
            kv = project("kv_b_proj", c).reshape(len(ids), HEADS, NOPE + VALUE)
            k = np.concatenate([kv[..., :NOPE], np.broadcast_to(key, (len(ids), HEADS, ROPE))], axis=-1)
            v, scale = kv[..., NOPE:], (NOPE + ROPE) ** -0.5
        else:
            kv_heads = config["num_key_value_heads"]
            q = rotated(project("q_proj", h[rows]).reshape(len(rows), HEADS, HEAD), rows, False)
            k = rotated(project("k_proj", h).reshape(len(ids), kv_heads, HEAD), every, False)
            v, scale = project("v_proj", h).reshape(len(ids), kv_heads, HEAD), HEAD ** -0.5
        out = attend(q, k, v, rows, scale)
        x = x[rows] + project("o_proj", out.reshape(len(rows), -1))
        h = normed(x, w[at + "post_attention_layernorm.weight"])
        gate = h @ w[at + "mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[at + "mlp.up_proj.weight"].T)) @ w[at + "mlp.down_proj.weight"].T
    logits = normed(x, w["model.norm.weight"]) @ w["lm_head.weight"].T
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2])
