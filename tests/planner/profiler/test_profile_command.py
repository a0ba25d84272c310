"""`cornplug profile`: arguments that do not go together are refused before anything starts."""

import pytest

from cornplug.errors import ConfigError
from cornplug.planner.profile_command import main

LLM = ["llm", "--gpu", "H100", "--out", "x.csv"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (LLM, "--model: is missing"),
        (["encoder", "--url", "http://h:1", "--gpu", "L4", "--out", "x.csv"], "--model: is missing"),
        ([*LLM, "--url", "http://h:1", "--", "--dtype", "float16"], "already running"),
        ([*LLM, "--model", "m", "--repeats", "1"], "too few for a median"),
        ([*LLM, "--model", "m", "--batches", "2,4"], "Start with 1"),
    ],
)
def test_profile_command_bad_arguments_are_refused(argv, said):
    with pytest.raises(ConfigError, match=said):
        main(argv)
