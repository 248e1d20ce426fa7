"""Make the model of the profile `cpu`: the configuration of a Llama of some 90 thousand parameters, and a tokenizer
whose tokens are words. It has no weights: sft.yaml begins with new ones (`init_from_scratch`).

python make_model.py --out model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import make_data
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig

PAD, BOS, EOS, UNK = SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
WORDS = Regex(r" ?[A-Za-z]+|[^A-Za-z]")
# A post ends in "TL;DR:", which asks for the summary.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{- message['content'] }}"
    "{%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}"
    "{%- endif %}{%- endfor %}"
)


def make_tokenizer() -> Tokenizer:
    splitter = pre_tokenizers.Split(WORDS, behavior="isolated")
    texts = [make_data.POST, make_data.SUMMARY, *make_data.BEFORE, *make_data.AFTER, "advice stories"]
    texts += [f" {word}" for word in (*make_data.NAMES, *make_data.DEEDS, *make_data.THINGS, *make_data.PLACES)]
    texts += [f" {text}" for text in (*make_data.BEFORE, *make_data.AFTER)]
    words = sorted({word for text in texts for word, _ in splitter.pre_tokenize_str(text)})
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    out = parser.parse_args().out
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32: vLLM's CPU backend has no smaller ones
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.token_to_id(PAD),
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
    )
    config.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNK,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


if __name__ == "__main__":
    main()
