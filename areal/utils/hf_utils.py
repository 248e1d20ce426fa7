"""AReaL's import path of the tokenizer loaders."""

from areal.dataset.tokenizers import load_hf_processor_and_tokenizer, load_hf_tokenizer

__all__ = ["load_hf_processor_and_tokenizer", "load_hf_tokenizer"]
