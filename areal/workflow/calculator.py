"""Arithmetic as tools of agents: plain functions, whose signatures and docstrings are the schemas."""

from __future__ import annotations


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def subtract(a: float, b: float) -> float:
    """Subtract b from a."""
    return a - b


def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


def divide(a: float, b: float) -> float:
    """Divide a by b."""
    return a / b


TOOLS = (add, subtract, multiply, divide)
INSTRUCTIONS = "Solve the math problem, with the calculator where it helps. End with the final answer in \\boxed{}."
