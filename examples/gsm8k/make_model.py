"""Make the model of the profile `cpu`: a Llama of some 100 thousand parameters that answers `3+4=\\boxed{7}`.

A token is a word, a digit or a sign. The model is fine-tuned on problems of make_data.py, and stopped early on purpose:
sampled at temperature 1, some of its answers are right, so that reinforcement learning has successes to learn from and
room to grow. It takes some ten seconds on one core:

    python make_model.py --out model
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from make_data import NAMES, STORIES, THINGS, problem
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

INSTRUCTION = "\nPlease put your final answer within \\boxed{}."  # areal adds it to a question of GSM8K
PAD, BOS, EOS, UNK, ASK = SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<ask>")
WORDS = Regex(r" ?[A-Za-z]+|[^A-Za-z]")
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{- message['content'] + '<ask>' }}"
    "{%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}"
    "{%- endif %}{%- endfor %}"
)


def make_tokenizer() -> Tokenizer:
    splitter = pre_tokenizers.Split(WORDS, behavior="isolated")
    texts = [problem(story, name, things, 1, 1)["question"] for story in STORIES for name in NAMES for things in THINGS]
    words = {word for text in (*texts, INSTRUCTION) for word, _ in splitter.pre_tokenize_str(text)}
    vocabulary = (*SPECIAL, *sorted(words | set("0123456789+=\\{}") | {"boxed"}))
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token=UNK))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def make_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
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
    return LlamaForCausalLM(config)


def batch_of(tokenizer: Tokenizer, count: int, source: random.Random) -> tuple[torch.Tensor, ...]:
    """Random problems: tokens and attention [count, length], padded on the left, and how many are the answer's
    [count]."""
    rows, sizes = [], []
    for _ in range(count):
        a, b = source.randint(1, 9), source.randint(1, 9)
        asked = problem(source.choice(STORIES), source.choice(NAMES), source.choice(THINGS), a, b)["question"]
        answer = tokenizer.encode(f"{a}+{b}=\\boxed{{{a + b}}}{EOS}").ids
        rows.append(tokenizer.encode(f"{BOS}{asked}{INSTRUCTION}{ASK}").ids + answer)
        sizes.append(len(answer))
    longest = max(map(len, rows))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    return padded, (padded != 0).long(), torch.tensor(sizes)


def answers(tokens: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Which tokens are of an answer [count, length]."""
    return torch.arange(tokens.shape[1]).expand_as(tokens) >= tokens.shape[1] - sizes[:, None]


@torch.no_grad()
def sampled_accuracy(model: LlamaForCausalLM, tokenizer: Tokenizer, source: random.Random, count: int = 512) -> float:
    """Return the probability of the right answer, sampled at temperature 1."""
    tokens, attention, sizes = batch_of(tokenizer, count, source)
    logprobs = model(input_ids=tokens, attention_mask=attention).logits[:, :-1].log_softmax(-1)
    each = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
    return float((each * answers(tokens, sizes)[:, 1:]).sum(-1).exp().mean())


def fine_tune(model: LlamaForCausalLM, tokenizer: Tokenizer, options: argparse.Namespace) -> tuple[int, float]:
    """Train until the sampled accuracy is ``target``, looked at every five steps; returns (steps, accuracy)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    source = random.Random(options.seed)
    for step in range(1, options.max_steps + 1):
        tokens, attention, sizes = batch_of(tokenizer, options.batch, source)
        labels = tokens.masked_fill(~answers(tokens, sizes), -100)
        loss = model(input_ids=tokens, attention_mask=attention, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0:
            accuracy = sampled_accuracy(model, tokenizer, source)
            if step % 100 == 0:
                print(f"step {step}: loss {float(loss):.3f}, sampled accuracy {accuracy:.3f}", flush=True)
            if accuracy >= options.target:
                return step, accuracy
    raise SystemExit(f"no {options.target:.2f} sampled accuracy within {options.max_steps} steps")


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    model.generation_config.do_sample = True
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNK,
        "additional_special_tokens": [ASK],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--target", type=float, default=0.12, help="sampled accuracy at which fine-tuning stops")
    parser.add_argument("--max-steps", type=int, default=5000)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    steps, accuracy = fine_tune(model, tokenizer, options)
    save(model, tokenizer, options.out)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.out}: {size} parameters, sampled accuracy {accuracy:.3f} after {steps} steps")


if __name__ == "__main__":
    main()
