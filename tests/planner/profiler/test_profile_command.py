"""`cornplug profile`: arguments that do not go together are refused before anything starts."""

import pytest
from expected_errors import expect_error

from cornplug.errors import ConfigError
from cornplug.planner.profile_command import main

LLM = ["llm", "--gpu", "H100", "--out", "x.csv"]


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (LLM, "--model"),
        (["encoder", "--url", "http://h:1", "--gpu", "L4", "--out", "x.csv"], "--model"),
        ([*LLM, "--url", "http://h:1", "--", "--dtype", "float16"], "-- FLAGS"),
        ([*LLM, "--model", "m", "--repeats", "1"], "--repeats"),
        ([*LLM, "--model", "m", "--batches", "2,4"], "batches"),
    ],
)
def test_profile_command_bad_arguments_are_refused(argv, field):
    with expect_error(ConfigError, field=field):
        main(argv)
