"""Which services applications share, and the ways of their requests through them."""

from __future__ import annotations

from typing import Any

from cornplug.planner.candidates.replica_configs import paths
from cornplug.planner.inputs.request_sampling import request_classes
from cornplug.planner.inputs.schema import PlanInput

COMPONENTS = [
    {"name": "vit", "kind": "encoder", "fingerprint": "ab"},
    {"name": "vit-again", "kind": "encoder", "fingerprint": "ab"},
    {"name": "ears", "kind": "encoder"},
    {"name": "llm", "kind": "llm"},
    {"name": "voice", "kind": "generator"},
]


def app(name: str, *requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "llm": "llm", "requests": list(requests)} | more


def sees(encoder: str) -> dict[str, Any]:
    return {"name": "one", "rate": 1, "media": [{"encoder": encoder, "tokens": 64}]}


def ways(*apps: dict[str, Any]) -> dict[str, set[str]]:
    """Request class -> "structure: service > service"."""
    plan_input = PlanInput.model_validate(
        {"components": COMPONENTS, "applications": apps, "pool": [{"name": "n", "gpu": "L4"}]}
    )
    classes = request_classes(plan_input.applications)
    return {
        name: {f"{way.structure}: {' > '.join(s.name for s in way.stages)}" for way in found}
        for name, found in paths(classes, plan_input.components).items()
    }


def test_services_text_has_monolith_and_prefill_decode() -> None:
    found = ways(app("chat", {"name": "one", "rate": 1}))
    assert found == {"chat/one": {"monolith: llm/PD", "P+D: llm/P > llm/D"}}


def test_services_images_have_all_four_structures() -> None:
    assert ways(app("see", sees("vit")))["see/one"] == {
        "monolith: llm+vit/EPD",
        "E+PD: vit/E > llm/PD",
        "P+D: llm+vit/EP > llm/D",
        "E+P+D: vit/E > llm/P > llm/D",
    }


def test_services_text_may_use_engines_with_tower() -> None:
    found = ways(app("see", sees("vit")), app("chat", {"name": "one", "rate": 1}, structures=["monolith"]))
    assert found["chat/one"] == {"monolith: llm/PD", "monolith: llm+vit/EPD"}


def test_services_classes_of_different_media_may_share_engine_with_all_towers() -> None:
    """One service with one spare replica, in place of one for images and one for sound."""
    found = ways(
        app("see", sees("vit"), structures=["monolith"]), app("hear", sees("ears"), structures=["monolith"])
    )
    assert found == {
        "see/one": {"monolith: llm+vit/EPD", "monolith: llm+vit+ears/EPD"},
        "hear/one": {"monolith: llm+ears/EPD", "monolith: llm+vit+ears/EPD"},
    }


def test_services_encoders_of_equal_fingerprint_are_one() -> None:
    found = ways(app("a", sees("vit"), structures=["E+PD"]), app("b", sees("vit-again"), structures=["E+PD"]))
    assert found["a/one"] == found["b/one"] == {"E+PD: vit/E > llm/PD"}


def test_services_two_encoders_are_two_stages() -> None:
    both = sees("vit") | {"media": [{"encoder": "vit", "tokens": 64}, {"encoder": "ears", "tokens": 9}]}
    assert ways(app("hear", both, structures=["E+PD"]))["hear/one"] == {"E+PD: vit/E > ears/E > llm/PD"}


def test_services_generator_has_monolith_and_separate_structures() -> None:
    speaks = {"name": "one", "rate": 1, "generates": {"generator": "voice"}}
    assert ways(app("tts", speaks))["tts/one"] == {
        "monolith: llm+voice/PDG",
        "monolith+G: llm/PD > voice/G",
        "P+D+G: llm/P > llm/D > voice/G",
    }


def test_services_structures_listed_exclude_others() -> None:
    speaks = {"name": "one", "rate": 1, "generates": {"generator": "voice"}}
    found = ways(app("tts", speaks, structures=["+G"]))
    assert found["tts/one"] == {"monolith+G: llm/PD > voice/G"}
