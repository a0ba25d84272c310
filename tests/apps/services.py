"""A small apps file for tests, with changes."""

from __future__ import annotations

from pathlib import Path

from cornplug.apps import AppsFile

TEXT = """\
name = "services"

[launch]
port = 18500
store_gib = 2.0

[[qos]]
name = "premium"
share = 0.5
priority = 10
deadline_s = 2.0

[[qos]]
name = "standard"
share = 0.3

[[components]]
name = "small"
kind = "llm"
model = "org/small"
engines = ["vllm"]
resources = { devices = [0] }

[[components]]
name = "large"
kind = "llm"
model = "org/large"
engines = ["sglang"]
tp = [2]
resources = { devices = [1, 2], flags = ["--context-length", "4096"], env = { NCCL_DEBUG = "WARN" } }

[[components]]
name = "tower-of-small"
kind = "encoder"
model = "org/small"
fingerprint = "one tower"
shares = [0.5]
resources = { devices = [3] }

[[components]]
name = "tower-of-large"
kind = "encoder"
model = "org/large"
fingerprint = "one tower"

[[components]]
name = "speech"
kind = "generator"

[components.resources]
device = "cpu"
devices = [0]
command = ["python", "speech.py", "--port", "{port}"]
health = "/ok"

[[applications]]
name = "chat-vlm"
llm = "small"
qos = "standard"
slo = { ttft_s = 1.0 }
system_prompt = "You see."
prefixes = ["The manual: ..."]
namespace = { share = 0.25, priority = 1, ttl_s = 3600.0 }
requests = [
  { name = "picture", rate = 2.0, media = [{ encoder = "tower-of-small", tokens = 256 }] },
  { name = "text", rate = 1.0 },
]

[[applications]]
name = "chat-vlm-pro"
llm = "large"
qos = "premium"
tenant = "acme"
slo = { ttft_s = 0.7 }
requests = [{ name = "picture", rate = 1.0, media = [{ encoder = "tower-of-large", tokens = 256 }] }]

[[applications]]
name = "tts"
llm = "small"
workload = "offline"
requests = [{ name = "answer", rate = 0.5, generates = { generator = "speech" } }]
"""


def services(folder: Path, *changes: tuple[str, str]) -> AppsFile:
    """The file after changes of its text, read."""
    return AppsFile.read(written(folder, *changes))


def written(folder: Path, *changes: tuple[str, str]) -> Path:
    """The file's path after changes of its text."""
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    path = folder / "services.toml"
    path.write_text(text)
    return path
