"""A client that names its own media, on real engines: no other client gets an answer about them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from cornplug.host import tls_context
from devkit import checkpoints
from devkit.engines import Answer, StoreProcess, VllmServer, data_url
from devkit.processes import together

WORDS = "What is shown? " + " ".join(f"Rule {i}: name the colour." for i in range(30))


def picture(colour: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (56, 56), colour).save(out, "PNG")
    return out.getvalue()


RED, BLUE = picture("red"), picture("blue")


def post(server: VllmServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=120, trust_env=False, verify=tls_context())


def rendered(server: VllmServer, image: bytes) -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": data_url(image)}},
        {"type": "text", "text": WORDS},
    ]
    body = {"model": "model", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    answer = post(server, "/v1/chat/completions/render", {**body, "temperature": 0})
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def ask(server: VllmServer, image: bytes) -> Answer:
    return server.chat(WORDS, images=[image], max_tokens=8)


def test_client_names_of_media_poison_no_other_request(tmp_path: Path) -> None:
    model, store_socket = checkpoints.qwen2_vl(tmp_path / "q"), tmp_path / "s.sock"
    flags = ("--kv-connector", "cornplug", "--cornplug-store", str(store_socket), "--cornplug-save", "always")
    stock = VllmServer(model, log=tmp_path / "stock.log")
    first = VllmServer(model, *flags, "--enable-scale-out", log=tmp_path / "first.log")
    fresh = VllmServer(model, *flags, log=tmp_path / "fresh.log")
    with StoreProcess(store_socket):
        with together(stock, first):
            red, blue = ask(stock, RED), ask(stock, BLUE)
            assert red.token_ids != blue.token_ids
            names = rendered(first, RED)["features"]["mm_hashes"]
            forged = rendered(first, BLUE)
            for name in (*names["image"], "cp1-zz", "cpv1-zz", "local-zz", "unshared-modality-zz"):
                forged["features"]["mm_hashes"] = {"image": [name]}
                answer = post(first, "/inference/v1/generate", forged)
                assert answer.status_code == 200, answer.text
                assert tuple(answer.json()["choices"][0]["token_ids"]) == blue.token_ids
            # The engine's own caches have not taken blue for red either.
            assert ask(first, RED).token_ids == red.token_ids
            assert first.metric("cornplug_misses_total", reason="named_by_client") > 0
        with together(fresh):
            assert ask(fresh, RED).token_ids == red.token_ids
            assert ask(fresh, BLUE).token_ids == blue.token_ids
