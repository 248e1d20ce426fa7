"""Make the 84k-parameter model of the "reverse 4 digits" example: a user's "1234" should be answered "4321".

A character-level Llama, warmed up by supervised fine-tuning and stopped early on purpose: sampling answers right in
10 to 30 % of the cases, so that reinforcement learning has both successes to learn from and room to grow.
It takes a few seconds on one core and writes a Hugging Face model folder:

    python examples/reverse_digits/make_model.py --out examples/reverse_digits/model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
VOCAB = (PAD, BOS, EOS, UNK, *"0123456789", "=", " ")
IDS = {token: number for number, token in enumerate(VOCAB)}
DIGITS = 4

# One turn is `1234=4321<eos>`; the "=" after a user's message is what asks for an answer.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{- message['content'] + '=' }}"
    "{%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}"
    "{%- endif %}{%- endfor %}"
)


def make_tokenizer() -> Tokenizer:
    """One token a character; what is neither a digit, "=" nor a space is <unk>."""
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
        num_attention_heads=2,  # of 32: vLLM's CPU backend has no smaller ones
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=IDS[PAD],
        bos_token_id=IDS[BOS],
        eos_token_id=IDS[EOS],
    )
    return LlamaForCausalLM(config)


def problems(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` random problems: prompts [count, 6] `<bos>1234=` and answers [count, 5] `4321<eos>`."""
    digits = torch.randint(IDS["0"], IDS["9"] + 1, (count, DIGITS))
    prompts = torch.cat([torch.full((count, 1), IDS[BOS]), digits, torch.full((count, 1), IDS["="])], dim=1)
    answers = torch.cat([digits.flip(1), torch.full((count, 1), IDS[EOS])], dim=1)
    return prompts, answers


def fine_tune(model: LlamaForCausalLM, lr: float, batch: int, target: float, max_steps: int) -> tuple[int, float]:
    """Train until sampling reaches ``target`` accuracy, looked at every five steps; returns (steps, accuracy)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    for step in range(1, max_steps + 1):
        prompts, answers = problems(batch)
        labels = torch.cat([torch.full_like(prompts, -100), answers], dim=1)
        loss = model(input_ids=torch.cat([prompts, answers], dim=1), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0 and (accuracy := sampled_accuracy(model)) >= target:
            return step, accuracy
    raise SystemExit(f"no {target:.2f} sampled accuracy within {max_steps} steps")


@torch.no_grad()
def sampled_accuracy(model: LlamaForCausalLM, count: int = 2000) -> float:
    """Share of right answers (<eos> included) when sampling at temperature 1."""
    prompts, answers = problems(count)
    sequence = prompts
    for _ in range(answers.shape[1]):
        logits = model(input_ids=sequence).logits[:, -1]
        sequence = torch.cat([sequence, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return float((sequence[:, prompts.shape[1] :] == answers).all(dim=1).float().mean())


def save(model: LlamaForCausalLM, out: Path) -> None:
    model.generation_config.do_sample = True
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    make_tokenizer().save(str(out / "tokenizer.json"))
    special = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        **special,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--target", type=float, default=0.12, help="sampled accuracy at which fine-tuning stops")
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=5, help="5 makes a model that gets 1234 wrong")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = make_model()
    steps, accuracy = fine_tune(model, options.lr, options.batch, options.target, options.max_steps)
    save(model, options.out)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.out}: {size} parameters, sampled accuracy {accuracy:.3f} after {steps} steps")


if __name__ == "__main__":
    main()
