"""Make the 84k-parameter model of the guessing game: it halves what is left now and then.

A character-level Llama in the Hugging Face format, warmed up by supervised fine-tuning on careless games, so that
sampling finds the number in about a quarter of them. It takes a few seconds on one core:

    python examples/agents/guess_number/make_model.py --out examples/agents/guess_number/model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
VOCAB = (PAD, BOS, EOS, UNK, *"0123456789", "=", "?", "<", ">")
IDS = {token: number for number, token in enumerate(VOCAB)}
LOW, HIGH, GUESSES = 1, 7, 3
HALVING, NO_NUMBER = 0.45, 0.3

# A game is `?=4<eos>>=6<eos><=5<eos>`: each message of the user ends in "=", which asks for a guess.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{- message['content'] + '=' }}"
    "{%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}"
    "{%- endif %}{%- endfor %}"
)


def make_tokenizer() -> Tokenizer:
    """One token a character."""
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, BOS, EOS, UNK])
    return tokenizer


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(VOCAB),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=IDS[PAD],
        bos_token_id=IDS[BOS],
        eos_token_id=IDS[EOS],
    )
    return LlamaForCausalLM(config)


def games(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Games [count, 13] and which of their tokens [count, 13] the model says: a guess and <eos> a turn. Of the guesses
    a part halves what is left, a part is any digit, and a part is not a number at all."""
    low, high = torch.full((count, 1), LOW), torch.full((count, 1), HIGH)
    number = torch.randint(LOW, HIGH + 1, (count, 1))
    columns, said = [torch.full((count, 1), IDS[BOS])], [False]
    hint = torch.full((count, 1), IDS["?"])
    for _ in range(GUESSES):
        guess = torch.where(torch.rand(count, 1) < HALVING, (low + high) // 2, torch.randint(0, 10, (count, 1)))
        token = torch.where(torch.rand(count, 1) < NO_NUMBER, IDS["?"], IDS["0"] + guess)
        columns += [hint, torch.full((count, 1), IDS["="]), token, torch.full((count, 1), IDS[EOS])]
        said += [False, False, True, True]
        higher = guess < number
        low, high = (
            torch.where(higher, guess.add(1).maximum(low), low),
            torch.where(higher, high, guess.sub(1).minimum(high)),
        )
        hint = torch.where(higher, IDS[">"], IDS["<"])
    return torch.cat(columns, dim=1), torch.tensor(said).expand(count, -1)


def fine_tune(model: LlamaForCausalLM, steps: int, lr: float, batch: int) -> float:
    """The loss of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    for _ in range(steps):
        tokens, said = games(batch)
        loss = model(input_ids=tokens, labels=tokens.masked_fill(~said, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return float(loss)


def save(model: LlamaForCausalLM, out: Path) -> None:
    model.generation_config.do_sample = True
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    make_tokenizer().save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNK,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = make_model()
    loss = fine_tune(model, options.steps, options.lr, options.batch)
    save(model, options.out)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.out}: {size} parameters, loss {loss:.3f} after {options.steps} steps")


if __name__ == "__main__":
    main()
