import pytest

from areal.training.algorithms.advantages import KLController


def test_coefficient_follows_the_divergence_as_in_ziegler_et_al() -> None:
    controller = KLController(target=0.1, horizon=100)
    coefficient = 1.0
    for kl in (0.05, 0.11, 0.2, 0.1, -0.3):
        error = max(-0.2, min(0.2, (kl - 0.1) / 0.1))
        coefficient *= 1 + error * 16 / 100
        controller.update(kl, 16)
        assert controller.factor == pytest.approx(coefficient)


def test_coefficient_without_a_target_stays() -> None:
    controller = KLController()
    controller.update(5.0, 1000)
    assert controller.factor == 1.0
