"""Which encoder services the engines of a plan ask, and how."""

from __future__ import annotations

from cornplug.planner.launch.connections import EncoderLink, encoder_links, replica_addresses
from cornplug.planner.plan import Plan

from ..plans import Case, plan

ENGINE = "llm7+vit/PD@nodes"
HOSTS = ("a", "b", "c")


def placed(encoders: list[int], engines: list[int]) -> Plan:
    """A plan with so many replicas of each on the hosts a, b, c."""
    made = plan(Case("E+PD"))
    changed = [
        group.model_copy(
            update={
                "replicas": sum(numbers),
                "placement": [[node, first + g] for node, n in enumerate(numbers) for g in range(n)],
            }
        )
        for group, numbers, first in zip(made.groups, (encoders, engines), (0, 4), strict=True)
    ]
    nodes = made.nodes[0].model_copy(update={"count": 3, "hosts": [*HOSTS]})
    return made.model_copy(update={"groups": changed, "nodes": [nodes]})


def links(encoders: list[int], engines: list[int]) -> dict[str, str]:
    """Host -> the flag's value there: "socket", or the hosts of the URLs with their weights."""
    made = placed(encoders, engines)
    found = encoder_links(made, replica_addresses(made))
    assert all(group == ENGINE for group, _ in found)
    return {
        host: "socket"
        if link.socket
        else " ".join(u[len("http://") :].replace(":8750", "") for u in link.urls)
        for (_, host), link in found.items()
    }


def test_encoder_links_host_with_the_only_service_has_its_socket_others_its_url() -> None:
    assert links([2, 0, 0], [1, 1, 0]) == {"a": "socket", "b": "a"}


def test_encoder_links_services_apart_from_engines_are_all_named() -> None:
    assert links([1, 1, 0], [0, 0, 2]) == {"c": "a b"}


def test_encoder_links_services_beside_all_engines_in_proportion_are_asked_by_socket() -> None:
    assert links([1, 1, 0], [2, 2, 0]) == {"a": "socket", "b": "socket"}


def test_encoder_links_service_of_a_host_without_engines_gets_its_part() -> None:
    """By its socket alone, the one would do the work of two."""
    assert links([1, 1, 0], [2, 0, 0]) == {"a": "a b"}


def test_encoder_links_services_of_unequal_size_have_the_weights_of_the_plan() -> None:
    assert links([3, 1, 0], [0, 0, 2]) == {"c": "a#3 b#1"}
    # With a's socket for a's engine, a would get 1/3 and 2/3 of 2/3: 1.17 times its part.
    assert links([2, 1, 0], [1, 2, 0]) == {"a": "a#2 b#1", "b": "a#2 b#1"}


def test_encoder_links_engine_that_encodes_itself_has_none() -> None:
    made = plan(Case())
    assert encoder_links(made, replica_addresses(made)) == {}
    assert EncoderLink().flags == []


def test_encoder_links_server_of_another_kind_has_none() -> None:
    """An external generator behind an encoder pulls nothing."""
    made = placed([1, 0, 0], [0, 1, 0])
    encoder, engine = made.groups
    other = made.model_copy(update={"groups": [encoder, engine.model_copy(update={"engine": "external"})]})
    assert encoder_links(other, replica_addresses(other)) == {}


def test_encoder_links_socket_and_urls_in_both_forms_of_vllm() -> None:
    near, far = EncoderLink(socket="/run/e.sock"), EncoderLink(urls=("http://a:8750", "http://b:8750"))
    assert near.flags == ["--cornplug-encoder", "/run/e.sock"]
    assert near.extra_config == {"encoder.socket": "/run/e.sock"}
    assert far.flags == ["--cornplug-encoder", "http://a:8750,http://b:8750"]
    assert far.extra_config == {"encoder.engine_urls": "http://a:8750,http://b:8750"}
