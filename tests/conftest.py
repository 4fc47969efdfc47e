"""Fixtures that every room of the tests shares: a printed seed and tiny random models."""

import os
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch


@pytest.fixture
def seed() -> int:
    """A fresh seed, printed so that a failure can be repeated with PEFTKIT_TEST_SEED."""
    value = int(os.environ.get("PEFTKIT_TEST_SEED") or random.SystemRandom().randrange(2**31))
    print(f"PEFTKIT_TEST_SEED={value}")
    torch.manual_seed(value)
    return value
