"""Make the model of the profile `cpu`: a Llama of some 110 thousand parameters that searches carelessly.

A token is a word; the beginning and the end of a tool call are one token each. The model is fine-tuned on episodes of
people and towns drawn anew for each, so that it learns to copy names and knows none by heart. At each step it does what
is right in half of the cases, and else searches for or answers with a random name. It takes a minute on one core:

    python make_model.py --out model
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from make_data import ASK_COUNTRY, ASK_TOWN, COUNTRIES, LIES, LIVES, PEOPLE, TOWNS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

PAD, BOS, EOS, UNK, ASK, TOOLS = SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<ask>", "<tools>")
CALL, END = '<tool_call>\n{"name": "search", "arguments": {"query": "', '"}}\n</tool_call>'
NOTHING = "nothing was found"
WORDS = Regex(r" ?[A-Za-z]+|[^A-Za-z]")
RIGHT = 0.55  # how often a step is the right one
CHAT_TEMPLATE = (
    "{{- bos_token }}{%- if tools %}{{- '<tools>' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' or message['role'] == 'tool' %}{{- message['content'] + '<ask>' }}"
    "{%- elif message['role'] == 'assistant' %}{{- message['content'] or '' }}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{{- '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' + "
    "(call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}"
    "{%- endfor %}{{- eos_token }}"
    "{%- endif %}{%- endfor %}"
)


def make_tokenizer() -> Tokenizer:
    splitter = pre_tokenizers.Split(WORDS, behavior="isolated")
    names = (*PEOPLE, *TOWNS, *COUNTRIES)
    texts = [each.format("Ad", "Ad") for each in (ASK_TOWN, ASK_COUNTRY, LIVES, LIES, "{} is a country.")] + [NOTHING]
    known = {word for text in texts for word, _ in splitter.pre_tokenize_str(text)} | {f" {name}" for name in names}
    vocabulary = (*SPECIAL, CALL, END, *sorted(known | set(names)))
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token=UNK))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in (CALL, END)])
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
        tie_word_embeddings=True,
        pad_token_id=tokenizer.token_to_id(PAD),
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
    )
    return LlamaForCausalLM(config)


def episode(source: random.Random, right: float) -> list[tuple[str, bool]]:
    """Return a careless episode: its texts, and whether the model says them."""
    person, town, country = source.choice(PEOPLE), source.choice(TOWNS), source.choice(COUNTRIES)
    wants_country = source.random() < 0.5
    parts = [((ASK_COUNTRY if wants_country else ASK_TOWN).format(person), False)]
    known = person
    for _ in range(4):
        found = known == (country if wants_country else town)
        if source.random() < right:
            is_answer, name = found, known
        else:
            is_answer, name = source.random() < 0.5, source.choice((*PEOPLE, *TOWNS, *COUNTRIES))
        if is_answer:
            return [*parts, (f"{ASK} {name}{EOS}", True)]
        if name in (person, town):
            known = town if name == person else country
            shown = LIVES.format(person, town) if name == person else LIES.format(town, country)
        elif name in PEOPLE:
            shown = LIVES.format(name, source.choice(TOWNS))
        elif name in TOWNS:
            shown = LIES.format(name, source.choice(COUNTRIES))
        else:
            shown = f"{name} is a country."
        parts += [(f"{ASK}{CALL} {name}{END}{EOS}", True), (shown, False)]
    return parts


def batch_of(
    tokenizer: Tokenizer, count: int, source: random.Random, right: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [count, length], padded on the right, and the labels: the tokens after <ask> that the model says."""
    rows, labels = [], []
    for _ in range(count):
        row = [tokenizer.token_to_id(BOS), tokenizer.token_to_id(TOOLS)]
        said = [-100, -100]
        for text, own in episode(source, right):
            ids = tokenizer.encode(text).ids
            row += ids
            said += [-100, *ids[1:]] if own else [-100] * len(ids)
        rows.append(row)
        labels.append(said)
    longest = max(map(len, rows))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return padded, torch.tensor([row + [-100] * (longest - len(row)) for row in labels])


def fine_tune(model: LlamaForCausalLM, tokenizer: Tokenizer, options: argparse.Namespace) -> float:
    """Return the loss of the last steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 - 2 * step / options.steps))
    source, losses = random.Random(options.seed), []
    for step in range(1, options.steps + 1):
        tokens, labels = batch_of(tokenizer, options.batch, source, 1.0 if step < options.steps // 2 else RIGHT)
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss))
        if step % 100 == 0:
            print(f"step {step}: loss {sum(losses[-100:]) / 100:.3f}", flush=True)
    return sum(losses[-20:]) / 20


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
        "additional_special_tokens": [ASK, TOOLS],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    loss = fine_tune(model, tokenizer, options)
    save(model, tokenizer, options.out)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.out}: {size} parameters, loss {loss:.3f} after {options.steps} steps")


if __name__ == "__main__":
    main()
