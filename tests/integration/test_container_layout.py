"""The chart's pods as containers of one node: users, volumes, /dev/shm, probes, and the end of each.

No image is built and no cluster is asked: namespaces and mounts are made as the pods' specs say.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from encoder_service.conftest import png, sample_image
from integration.pods import Node, Pod

from devkit import checkpoints
from devkit.network_hosts import ADDRESSES, NetworkHosts, reason_against
from devkit.open_requests import OpenRequests
from devkit.processes import wait_until

render_manifests = pytest.importorskip("render_manifests", exc_type=ImportError)


ADMIN_KEY = secrets.token_hex(16)
VALUES = {
    "store": {"sizeGiB": 1},
    "encoder": {"models": ["/models/tiny"], "dtype": "float32", "gpus": 0},
    "engines": {"agents": None},
}
ITEMS = 48
LOOK = """
import json, os
from pathlib import Path
shm = os.statvfs("/dev/shm")
def writable(folder):
    try:
        Path(folder, "probe").touch()
    except OSError as e:
        return e.strerror
    return "writable"
print(json.dumps({
    "uid": os.getuid(), "groups": os.getgroups(), "shm": shm.f_blocks * shm.f_frsize,
    "capabilities": [line.split()[1] for line in open("/proc/self/status") if line[:4] in ("CapE", "CapB")],
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "pid", "ipc")},
    **{folder: writable(folder) for folder in ("/", "/models", "/etc/cornplug/secret", "/tmp")},
}))
"""
ENGINE = """
import json, sys
from cornplug.commands.doctor import describe_encoder
from cornplug.config import load
from cornplug.store.client import open_store
from cornplug.store.payload import get_payload
config = load()
models = describe_encoder(config)
if isinstance(models, Exception):
    sys.exit(str(models))
store = open_store(config.store, autostart=False, connect_timeout_s=10)
found = get_payload(store, bytes.fromhex(sys.argv[1]), deadline_s=10)
store.close()
rows = None if found is None else bytes(found[1]).hex()
print(json.dumps({"models": [one.name for one in models], "rows": rows}))
"""


def pod_of(objects: dict[str, list[dict[str, Any]]], file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(spec, container) of the pod that the first object of a template makes."""
    spec = objects[file][0]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


class Cluster:
    """A node with a store's pod, an encoder's and an engine's."""

    def __init__(self, folder: Path, network: NetworkHosts, ends: ExitStack) -> None:
        folder.chmod(0o755)
        for file in checkpoints.qwen2_vl(folder / "models" / "tiny").iterdir():
            file.chmod(0o644)  # safetensors writes files for their owner alone
        self.node = Node(
            folder=folder,
            secrets={"cornplug": {"secret": secrets.token_bytes(32), "admin-key": ADMIN_KEY.encode()}},
            claims={"models": folder / "models"},
            hosts={"cornplug-encoder": ADDRESSES[1]},
        )
        self._objects = render_manifests.render(VALUES)
        self._network, self._ends = network, ends
        self._place = {"enter": network.command(1), "address": ADDRESSES[1]}
        self.url = f"http://{ADDRESSES[1]}:8750"
        self.pods: list[Pod] = []

    def _pod(self, name: str, *arguments: Any, **options: Any) -> Pod:
        pod = Pod(name, *arguments, self.node, **options)
        self._ends.callback(pod.kill)
        self.pods.append(pod)
        pod.spawn()
        return pod

    def store(self, name: str) -> Pod:
        """The store, after its init container."""
        spec, container = pod_of(self._objects, "store.yaml")
        (before,) = spec["initContainers"]
        first = self._pod(f"{name}-folder", spec, before)
        assert first.wait_until_ended(30) == 0, first.log_excerpt()
        pod = self._pod(name, spec, container, **self._place)
        pod.await_ready()
        return pod

    def encoder(self) -> Pod:
        pod = self._pod("encoder", *pod_of(self._objects, "encoder.yaml"), **self._place)
        pod.await_ready()
        return pod

    def engine(self) -> Pod:
        """An engine's layout, in which nothing runs."""
        spec, container = pod_of(self._objects, "engines.yaml")
        pod = self._pod(
            "engine", spec, container, command=["sleep", "infinity"], enter=self._network.command(0)
        )
        wait_until(lambda: sleeps(pod), deadline_s=30, what="the engine's pod")
        return pod

    def encode(self, seed: int) -> dict[str, Any]:
        """The service's answer for an image, with its rows."""
        answer = httpx.post(
            f"{self.url}/v1/encode",
            data={"model": "/models/tiny", "inline": "true"},
            files={"image": png(sample_image(seed))},
            headers={"authorization": f"Bearer {ADMIN_KEY}"},
            timeout=60,
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def sleeps(pod: Pod) -> bool:
    try:
        return pod.run("cat", "/proc/1/comm") == "sleep\n"
    except (subprocess.CalledProcessError, ProcessLookupError):
        return False


@pytest.fixture
def cluster(tmp_path: Path, short_path: Path) -> Iterator[Cluster]:
    if reason := reason_against():
        pytest.skip(reason)
    with NetworkHosts() as network, network.entered(0), ExitStack() as ends:
        made = Cluster(short_path, network, ends)
        yield made
        ends.close()
        assert not [pod.name for pod in made.pods if pod.is_alive() or pod.pids()]


def seen(pod: Pod) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(pod.run("python", "-c", LOOK))
    return found


def test_container_layout_of_the_chart_shares_and_drains(cluster: Cluster) -> None:
    store = cluster.store("store")
    folder = cluster.node.path("/run/cornplug").stat()
    assert (folder.st_uid, folder.st_mode & 0o777) == (10001, 0o700)
    encoder, engine = cluster.encoder(), cluster.engine()

    # Each is the chart's user in namespaces of its own, and writes where it may.
    views = {pod.name: seen(pod) for pod in (store, encoder, engine)}
    here = {os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "pid", "ipc")}
    for name, view in views.items():
        assert (view["uid"], view["groups"]) == (10001, [10001]), name
        assert set(view["capabilities"]) == {16 * "0"}, name
        assert view["processes"] < 100, name
        assert view["/etc/cornplug/secret"] != "writable", name
        assert view["/tmp"] == "writable", name
        assert (view["/"] == "writable") is False, name
        assert not here & set(view["namespaces"].values()), name
    assert views["pod encoder"]["/models"] == "Read-only file system"
    assert views["pod encoder"]["/"] == views["pod store"]["/"] == "Read-only file system"
    sizes = {name: view["shm"] for name, view in views.items()}
    assert sizes == {"pod store": 64 << 20, "pod encoder": 1 << 30, "pod engine": 8 << 30}
    assert len({view["namespaces"]["ipc"] for view in views.values()}) == 3

    # The encoder computes once, shares through the store, and an engine finds the rows there.
    answer = cluster.encode(1)
    assert (answer["origin"], answer["stored"]) == ("computed", True)
    told = json.loads(engine.run("python", "-c", ENGINE, answer["key"]))
    assert told == {"models": ["/models/tiny"], "rows": base64.b64decode(answer["data"]).hex()}
    assert cluster.encode(1)["origin"] == "cached"
    refused = httpx.get(f"{cluster.url}/metrics", timeout=10, trust_env=False)
    assert refused.status_code == 401

    # A store that ends, and its successor, for which the folder is made ready once more.
    began_s = time.monotonic()
    assert store.stop(grace_s=store.grace_s()) == 0, store.log_excerpt()
    assert time.monotonic() - began_s < store.grace_s()
    assert not store.passes("livenessProbe")
    store = cluster.store("next-store")
    wait_until(
        lambda: cluster.encode(secrets.randbelow(1 << 30))["stored"], deadline_s=30, what="a stored image"
    )

    # The encoder finishes what it has begun before Kubernetes would kill it.
    images = [png(sample_image(1000 + i, 900, 900)) for i in range(ITEMS)]
    data = {"model": "/models/tiny", "deadline_s": "60"}
    with OpenRequests(cluster.url, {"authorization": f"Bearer {ADMIN_KEY}"}) as requests:
        requests.send("/v1/encode", ({"data": data, "files": {"image": image}} for image in images))
        began_s = time.monotonic()
        encoder.terminate()
        assert requests.answered() < ITEMS, "all was done before: the test saw no draining"
        wait_until(
            lambda: not encoder.passes("readinessProbe"), deadline_s=10, what="an encoder that is not ready"
        )
        assert requests.statuses() == [200] * ITEMS
        assert encoder.wait_until_ended(encoder.grace_s()) == 0, encoder.log_excerpt()
        assert time.monotonic() - began_s < encoder.grace_s()
    assert store.passes("livenessProbe")
