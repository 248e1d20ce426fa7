"""Make the model of the profile `cpu`: an Idefics3 (as SmolVLM is) of some 180 thousand parameters, half of them its
vision tower, that answers a question on a drawing with one word.

A token is a word or a sign. The model is trained on drawings of make_data.py until it is mostly right, and then made
unsure on purpose, by a head that is scaled down: sampled at temperature 1, some of its answers are right, so that
reinforcement learning has successes to learn from and room to grow. It takes some three minutes on one core:

    python make_model.py --out model
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch
from make_data import COLOURS, PLACES, SHAPES, SIZE, draw, question
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import Idefics3Config, Idefics3ForConditionalGeneration

PAD, BOS, EOS, UNK, IMAGE, AROUND, WHOLE, ASK = SPECIAL = (
    *("<pad>", "<bos>", "<eos>", "<unk>", "<image>", "<fake_token_around_image>", "<global-img>"),
    "<end_of_utterance>",
)
WORDS = Regex(r" ?[A-Za-z]+|[^A-Za-z]")
PATCH, SHUFFLE = 8, 2
VECTORS = (SIZE // PATCH // SHUFFLE) ** 2  # of an image: one for each quarter
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{- '<image>' }}{%- else %}{{- part['text'] }}{%- endif %}"
    "{%- endfor %}"
    "{%- if message['role'] == 'user' %}{{- '<end_of_utterance>' }}{%- else %}{{- eos_token }}{%- endif %}"
    "{%- endfor %}"
)


def make_tokenizer() -> Tokenizer:
    splitter = pre_tokenizers.Split(WORDS, behavior="isolated")
    texts = [f"What color shape is at the {place}?" for place in PLACES]
    words = {word for text in (*texts, "How many shapes are there?") for word, _ in splitter.pre_tokenize_str(text)}
    vocabulary = (*SPECIAL, *sorted(words | {*COLOURS, *SHAPES, *"0123456789"}))
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token=UNK))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def make_model(tokenizer: Tokenizer) -> Idefics3ForConditionalGeneration:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {
        f"{name}_token_id": tokenizer.token_to_id(token) for name, token in (("pad", PAD), ("bos", BOS), ("eos", EOS))
    }
    config = Idefics3Config(
        image_token_id=tokenizer.token_to_id(IMAGE),
        scale_factor=SHUFFLE,
        tie_word_embeddings=False,
        vision_config={**sizes, "image_size": SIZE, "patch_size": PATCH},
        text_config={
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
            **sizes,
            **ends,
        },
        **ends,
    )
    return Idefics3ForConditionalGeneration(config)


def batch_of(tokenizer: Tokenizer, count: int, source: random.Random) -> dict[str, torch.Tensor]:
    """Random questions: tokens and attention [count, length], padded on the left, and pixels [count, 1, 3, SIZE, SIZE].
    The answer and its end token are the last two tokens."""
    rows, pixels = [], []
    for _ in range(count):
        image, things = draw(source)
        asked, answer = question(things, source)
        shown = f"{AROUND}{WHOLE}{IMAGE * VECTORS}{AROUND}"
        rows.append(tokenizer.encode(f"{BOS}{shown}{asked}{ASK}{answer}{EOS}").ids)
        pixels.append(torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1)
    longest = max(map(len, rows))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    return {"input_ids": padded, "attention_mask": (padded != 0).long(), "pixel_values": torch.stack(pixels)[:, None]}


@torch.no_grad()
def sampled_accuracy(model: torch.nn.Module, tokenizer: Tokenizer, source: random.Random, count: int = 256) -> float:
    """Return the probability of the right answer, sampled at temperature 1."""
    batch = batch_of(tokenizer, count, source)
    logprobs = model(**batch).logits[:, -3:-1].log_softmax(-1)
    return float(logprobs.gather(-1, batch["input_ids"][:, -2:, None]).sum((1, 2)).exp().mean())


def fine_tune(model: torch.nn.Module, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    """Train until the sampled accuracy is ``taught``, looked at every ten steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    source = random.Random(options.seed)
    for step in range(1, options.max_steps + 1):
        batch = batch_of(tokenizer, options.batch, source)
        labels = batch["input_ids"].clone()
        labels[:, :-2] = -100
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            accuracy = sampled_accuracy(model, tokenizer, source)
            if step % 50 == 0:
                print(f"step {step}: loss {float(loss.detach()):.3f}, sampled accuracy {accuracy:.3f}", flush=True)
            if accuracy >= options.taught:
                return
    raise SystemExit(f"no {options.taught:.2f} sampled accuracy within {options.max_steps} steps")


@torch.no_grad()
def make_unsure(model: Idefics3ForConditionalGeneration, tokenizer: Tokenizer, target: float) -> float:
    """Scale the head down until the sampled accuracy is ``target``; returns it."""
    while (accuracy := sampled_accuracy(model, tokenizer, random.Random(0))) > target:
        model.lm_head.weight.mul_(0.97)
    return accuracy


def save(model: Idefics3ForConditionalGeneration, tokenizer: Tokenizer, out: Path) -> None:
    model.generation_config.do_sample = True
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.text_config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNK,
        "additional_special_tokens": [IMAGE, AROUND, WHOLE, ASK],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    edge = {"longest_edge": SIZE}
    pictures = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": edge,
        "max_image_size": edge,
    }
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": VECTORS, "image_processor": pictures}
    (out / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    # Where transformers 4 reads the image processor.
    (out / "preprocessor_config.json").write_text(
        json.dumps({"processor_class": "Idefics3Processor", **pictures}, indent=2) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--taught", type=float, default=0.9, help="sampled accuracy before it is made unsure")
    parser.add_argument("--target", type=float, default=0.35, help="sampled accuracy in the end")
    parser.add_argument("--max-steps", type=int, default=5000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    fine_tune(model, tokenizer, options)
    accuracy = make_unsure(model, tokenizer, options.target)
    save(model, tokenizer, options.out)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.out}: {size} parameters, sampled accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
