"""Prefixes by engine: the leading steps count, and memory is bounded."""

from __future__ import annotations

from cornplug.apps.engine_choice import PrefixMemory


def test_prefix_memory_known_counts_leading_steps() -> None:
    memory = PrefixMemory()
    memory.remember("a", (1, 2, 3))
    assert [memory.count_known_steps("a", steps) for steps in ((1, 2, 3, 4), (1, 9, 3), (9, 2, 3), ())] == [
        3,
        1,
        0,
        0,
    ]
    assert memory.count_known_steps("b", (1, 2, 3)) == 0


def test_prefix_memory_bound_drops_the_longest_unused_end_first() -> None:
    memory = PrefixMemory(max_steps=4)
    memory.remember("a", (1, 2, 3))
    memory.remember("a", (7, 8))
    assert memory.count_known_steps("a", (1, 2, 3)) == 2
    memory.remember("a", (1,))
    memory.remember("a", (9,))
    assert (memory.count_known_steps("a", (1, 2)), memory.count_known_steps("a", (7, 8))) == (1, 2)


def test_prefix_memory_forget_is_of_one_engine() -> None:
    memory = PrefixMemory()
    memory.remember("a", (1,))
    memory.remember("b", (1,))
    memory.forget("a")
    assert (memory.count_known_steps("a", (1,)), memory.count_known_steps("b", (1,)), memory.engines()) == (
        0,
        1,
        ("b",),
    )


def test_prefix_memory_keep_drops_engines_that_a_launch_ended() -> None:
    memory = PrefixMemory()
    memory.remember("a", (1,))
    memory.remember("b", (1,))
    memory.retain(["b", "c"])
    assert memory.engines() == ("b",)
