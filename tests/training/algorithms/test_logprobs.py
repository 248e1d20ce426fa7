"""Log probabilities against torch's own, and where they stand."""

import torch

from areal.training.algorithms import losses as logprobs
from areal.training.algorithms.losses import token_entropies, token_logprobs


def _case() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 7, 11, generator=generator), torch.randint(0, 11, (3, 7), generator=generator)


def test_token_logprobs_refer_to_that_token() -> None:
    logits, ids = _case()
    got = token_logprobs(logits, ids, torch.full((3, 7), 0.7))
    assert got.shape == ids.shape
    for b in range(3):
        assert got[b, 0] == 0
        for t in range(1, 7):
            want = torch.log_softmax(logits[b, t - 1] / 0.7, -1)[ids[b, t]]
            torch.testing.assert_close(got[b, t], want)


def test_token_logprobs_are_independent_of_chunk_size(monkeypatch) -> None:
    logits, ids = _case()
    whole, parts = (logits.to(torch.bfloat16).requires_grad_() for _ in range(2))
    token_logprobs(whole, ids).sum().backward()
    monkeypatch.setattr(logprobs, "_CHUNK_VALUES", 30)
    token_logprobs(parts, ids).sum().backward()
    torch.testing.assert_close(whole.grad, parts.grad)


def test_at_most_one_chunk_of_logits_is_in_float32_at_once(monkeypatch) -> None:
    logits, ids = _case()
    sizes: list[int] = []
    cross_entropy = torch.nn.functional.cross_entropy

    def watched(scaled: torch.Tensor, *given, **more) -> torch.Tensor:
        sizes.append(scaled.numel())
        return cross_entropy(scaled, *given, **more)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", watched)
    for limit, chunk in ((33, 33), (32, 22), (5, 11), (1000, 18 * 11)):
        monkeypatch.setattr(logprobs, "_CHUNK_VALUES", limit)
        sizes.clear()
        token_logprobs(logits, ids)
        assert (max(sizes), sum(sizes)) == (chunk, 18 * 11)


def test_token_entropy_of_equal_logits_is_log_of_count() -> None:
    entropies = token_entropies(torch.zeros(1, 3, 8), torch.full((1, 3), 2.0))
    torch.testing.assert_close(entropies, torch.tensor([[0.0, 2.0794415, 2.0794415]]))
