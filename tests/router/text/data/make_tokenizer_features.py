"""Makes tokenizer_features.json: small tokenizers, each with other features, and what Hugging
Face's tokenizers library says about texts and ids. Needs `pip install tokenizers==0.23.3`.

    make_tokenizer_features.py [--seed N] [--variants N] > tokenizer_features.json
"""

import argparse
import json
import random
import sys

import tokenizers

WORDS = "the then there he her in ing and is 123 12 été 日本 한국 ' 's ll don't \n\n    x é".split(" ")
SPACES = [" ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u180e", "\u2003", "\u200b", "\x85"]
RARE = (
    "é e\u0301 ü Å \u212b \u1100\u1161 각 ½ ² Ⅷ ٣ १ \U0001d7d8 ß ſ K İ ʼn ﬁ ー 々 𠮷 \U000323af \U0001e4f0"
    " \U00011f50 \u0301 \u200d 👩\u200d👧 🏳️ \x00 \x7f \ufffd \U0010ffff _ $ € « ’"
).split(" ")
ADDED = ["<a>", "<b>", "<ab", "the", " x", "e\u0301", "日本", "don", "12", "</s>", "  ", "İ", "aa"]
REGEXES = [
    r"\p{N}{1,3}",
    r"\s?\p{L}+",
    r"[^\s\p{L}\p{N}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\s+$|^\S",
    r"a*",
    r"[\p{Lu}\p{Lt}\p{M}]*\p{Ll}+|\P{L}",
    r"(?<=e)n|(?<!t)h",
    r"[\s\S]{3}",
    r"\d+|\D\D",
    r" ?[^(\s|[.,!?])]+",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[\S&-]+?e",
    r"\S+\v?|\x{e9}|\u00e9",
]
BEHAVIORS = ["removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"]


def text(rng):
    parts = []
    for _ in range(rng.randrange(1, 10)):
        kind = rng.random()
        if kind < 0.4:
            parts.append(rng.choice(WORDS))
        elif kind < 0.6:
            parts.append(rng.choice(SPACES) * rng.randrange(1, 4))
        elif kind < 0.75:
            parts.append(rng.choice(RARE) * rng.randrange(1, 3))
        else:
            parts.append(rng.choice(ADDED))
    return "".join(parts)


def byte_alphabet():
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def base(rng):
    """A BPE over most bytes with random merges; some of these never apply, as in real files."""
    alphabet = byte_alphabet()
    dropped = set() if rng.random() < 0.6 else set(rng.sample(alphabet, 20))
    tokens = [c for c in alphabet if c not in dropped]
    merges = []
    spelled = ["".join(p for p, _ in byte_level().pre_tokenize_str(w)) for w in WORDS + RARE + SPACES]
    for _ in range(120):
        word = rng.choice(spelled)
        cut = sorted(rng.sample(range(len(word) + 1), min(3, len(word) + 1)))
        if len(cut) < 3:
            continue
        left, right = word[cut[0] : cut[1]], word[cut[1] : cut[2]]
        if left in tokens and right in tokens and left != "" and right != "":
            if left + right not in tokens:
                tokens.append(left + right)
            merges.append([left, right])
    if rng.random() < 0.3:
        rng.shuffle(merges)
    return tokens, merges


def byte_level():
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def behavior_name(name):
    return "".join(part.capitalize() for part in name.split("_"))


def pre_tokenizer(rng):
    steps = []
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        if rng.random() < 0.3:
            steps.append({"type": "Digits", "individual_digits": rng.random() < 0.5})
        else:
            literal = rng.random() < 0.2
            steps.append(
                {
                    "type": "Split",
                    "pattern": {"String": rng.choice(["e", " ", "..", "\n", "(", "日"])}
                    if literal
                    else {"Regex": rng.choice(REGEXES)},
                    "behavior": behavior_name(rng.choice(BEHAVIORS)),
                    "invert": rng.random() < 0.3,
                }
            )
    steps.append(
        {
            "type": "ByteLevel",
            "add_prefix_space": rng.random() < 0.3,
            "trim_offsets": True,
            "use_regex": rng.random() < 0.5,
        }
    )
    if len(steps) == 1 and rng.random() < 0.7:
        return steps[0]
    return {"type": "Sequence", "pretokenizers": steps}


def added_tokens(rng, vocab):
    added = []
    next_id = len(vocab)
    for content in rng.sample(ADDED, rng.randrange(0, 8)):
        spelled = content if content in vocab else None
        token_id = vocab[content] if spelled else next_id
        next_id = max(next_id, token_id + 1)
        flags = {
            key: rng.random() < 0.25
            for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        # The library forgets that a token is special if normalization changes its name.
        flags["special"] = flags["special"] and content != "e\u0301"
        # It panics on white space that two tokens claim.
        flags["lstrip"] = flags["lstrip"] and not content.isspace()
        added.append({"id": token_id, "content": content, **flags})
    return added


def post_processor(rng, added):
    if not added or rng.random() < 0.4:
        return None
    name = rng.choice(added)
    special = {name["content"]: {"id": name["content"], "ids": [name["id"]], "tokens": [name["content"]]}}
    mark = {"SpecialToken": {"id": name["content"], "type_id": 0}}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    single = rng.choice([[mark, sequence], [sequence, mark], [mark, sequence, mark], [sequence]])
    template = {"type": "TemplateProcessing", "single": single, "pair": single + [
        {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": special}
    if rng.random() < 0.5:
        return template
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    return {"type": "Sequence", "processors": [level, template]}


def variant(rng):
    tokens, merges = base(rng)
    vocab = {token: i for i, token in enumerate(tokens)}
    added = added_tokens(rng, vocab)
    unknown = rng.choice(tokens) if rng.random() < 0.3 else None
    if rng.random() < 0.5:
        merges = [" ".join(pair) for pair in merges]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": rng.choice(
            [None, {"type": "NFC"}, {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
             {"type": "Sequence", "normalizers": []}]
        ),
        "pre_tokenizer": pre_tokenizer(rng),
        "post_processor": post_processor(rng, added),
        "decoder": rng.choice(
            [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
             {"type": "Sequence", "decoders": [{"type": "ByteLevel", "add_prefix_space": True,
              "trim_offsets": True, "use_regex": True}]}]
        ),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": rng.random() < 0.5,
            "byte_fallback": False,
            "ignore_merges": rng.random() < 0.3,
            "vocab": vocab,
            "merges": merges,
        },
    }


def reference(config, rng, num_texts):
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(config))
    texts = []
    for _ in range(num_texts):
        sample = text(rng)
        texts.append(
            {
                "text": sample,
                "ids": tokenizer.encode(sample, add_special_tokens=False).ids,
                "ids_with_special": tokenizer.encode(sample, add_special_tokens=True).ids,
            }
        )
    decodings = []
    for _ in range(num_texts):
        ids = [rng.randrange(tokenizer.get_vocab_size() + 2) for _ in range(rng.randrange(1, 20))]
        decodings.append(
            {
                "ids": ids,
                "text": tokenizer.decode(ids, skip_special_tokens=False),
                "text_without_special": tokenizer.decode(ids, skip_special_tokens=True),
            }
        )
    return {"tokenizer": config, "texts": texts, "decodings": decodings}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variants", type=int, default=12)
    parser.add_argument("--texts", type=int, default=8)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    variants = [reference(variant(rng), rng, args.texts) for _ in range(args.variants)]
    made_with = f"tokenizers {tokenizers.__version__}, seed {args.seed}"
    json.dump({"made_with": made_with, "variants": variants}, sys.stdout, separators=(",", ":"))
    print()


if __name__ == "__main__":
    main()
