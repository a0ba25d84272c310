"""One line at the start of a server whose requests may come rendered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.scale_out import factories

from cornplug.vllm_connector import plugin

OURS = SimpleNamespace(ec_connector="CornplugECConnector", ec_connector_extra_config={})
ARGUMENTS = {
    "enable_scale_out": False, "tokens_only": False, "return_tokens_as_token_ids": False,
    "enable_prompt_tokens_details": False, "enable_log_outputs": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "ec", "multimodal", "lines"),
    [
        ({"enable_scale_out": True}, OURS, object(), 1),
        ({"tokens_only": True}, OURS, object(), 1),
        ({}, OURS, object(), 0),
        ({"tokens_only": True}, None, object(), 0),
        ({"tokens_only": True}, OURS, None, 0),
    ],
)
def test_server_of_rendered_requests_says_what_is_not_shared(
    flags: dict[str, bool],
    ec: Any,
    multimodal: Any,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plugin.register()
    # vLLM's servers need a whole application.
    monkeypatch.setattr(factories, "init_render_state", lambda *_, **__: None)
    tokens = "vllm.entrypoints.scale_out.token_in_token_out.serving.ServingTokens"
    monkeypatch.setattr(tokens, lambda *_, **__: "served")
    config = SimpleNamespace(
        kv_transfer_config=None,
        ec_transfer_config=ec,
        model_config=SimpleNamespace(multimodal_config=multimodal),
    )
    names = "openai_serving_models online_renderer online_derenderer anthropic_serving_messages"
    state = SimpleNamespace(
        **dict.fromkeys(names.split(), SimpleNamespace(disabled_thinking_effort_resolver=None))
    )
    client = SimpleNamespace(vllm_config=config)
    factories.init_scale_out_state(state, SimpleNamespace(**{**ARGUMENTS, **flags}), client, None)
    assert state.serving_tokens == "served"
    assert caplog.text.count("share neither embeddings nor the KV after their first media item") == lines
