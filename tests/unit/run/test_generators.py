"""How weights are to travel."""

import re

import pytest

from laurel.run.generator import describe_generator, transfer_of


@pytest.mark.parametrize(
    ("setting", "device", "uses_vllm", "take_turns", "expected"),
    [
        ("auto", "cpu", False, False, ("broadcast", "cpu", "quicker .*; gloo")),
        ("auto", "cuda", False, False, ("broadcast", "cuda", "quicker .*; NCCL")),
        ("auto", "cuda", False, True, ("broadcast", "cpu", "gloo")),
        ("auto", "cuda", True, False, ("broadcast", "cpu", "gloo")),
        ("broadcast", "cuda", False, False, ("broadcast", "cuda", "it is set; NCCL")),
        ("object_store", "cuda", False, False, ("object_store", "cpu", "it is set")),
    ],
)
def test_the_way_and_its_reason(setting, device, uses_vllm, take_turns, expected):
    found = transfer_of(setting, device=device, uses_vllm=uses_vllm, take_turns=take_turns)
    name, where, reason = expected
    assert (found.name, found.device) == (name, where)
    assert re.search(reason, found.reason)


def test_who_draws_in_words():
    class Engine:
        pass

    assert describe_generator(Engine()) == "Engine"
    engine = Engine()
    engine.transfer = transfer_of("object_store", device="cpu", uses_vllm=False, take_turns=False)
    assert describe_generator(engine) == "Engine, weights by object_store (it is set)"
