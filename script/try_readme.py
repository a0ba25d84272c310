"""Runs README's commands with an installed cornplug, as a user would after README's install line.

Usage: try_readme.py README.md PLAN.toml, by the interpreter of an environment that holds the wheel and the
extras that README names for it. Names of published models become tiny checkpoints made here, hosts this one.
Commands that start an engine are left to the tests of that engine. Exits 1 naming each command that failed or
that `Place.tries` does not know: a new command of README needs a line there.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

# Tried by CI itself, by the tests of that engine, or the very lines by which this environment was made.
_ELSEWHERE = ("script/", "vllm serve", "sglang serve", "pip install")
_READY_S = 600.0
"""Longest wait for the encoder service or a command: 15 s on two quiet cores, minutes beside other work."""
_STOP_S = 120.0


def main(readme: Path, plan: Path) -> int:
    text = readme.read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    commands = [line for kind, block in blocks if kind in ("", "bash") for line in _lines(block)]
    commands += re.findall(r"`(cornplug (?:doctor|fingerprint)[^`]*)`", text)
    snippets = [block for kind, block in blocks if kind == "python"]
    with tempfile.TemporaryDirectory(prefix="cp-") as name:
        place = Place(Path(name), plan)
        failed = [command for command in commands if not place.tries(command, snippets)]
    for command in failed:
        print(f"README: failed, or unknown to Place.tries: {command}", file=sys.stderr)
    print(f"README: {len(commands)} commands and {len(snippets)} Python snippets, {len(failed)} failed")
    return 1 if failed or not commands or not snippets else 0


def _lines(block: str) -> list[str]:
    return [line.strip() for line in block.replace("\\\n", " ").splitlines() if line.strip()]


class Place:
    """A folder with tiny models and separate settings."""

    def __init__(self, folder: Path, plan: Path) -> None:
        from PIL import Image

        # Makers of checkpoints are in the checkout only, and come last: cornplug is the wheel's.
        sys.path.append(str(Path(__file__).parents[1]))
        from devkit import checkpoints

        self._folder = folder
        a, b = (folder / "llava-7b", folder / "llava-13b")
        checkpoints.llava(a, llm_seed=1)
        checkpoints.llava(b, llm_seed=2, hidden_size=128)
        Image.effect_noise((64, 48), 60).convert("RGB").save(folder / "photo.jpg")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._names = {
            "llava-hf/llava-1.5-7b-hf": str(a),
            "llava-hf/llava-1.5-13b-hf": str(b),
            "MODEL": str(a),
            "plan.toml": str(plan),
            "http://a:8750": f"http://127.0.0.1:{self._port}",
            "http://b:8750": f"http://127.0.0.1:{self._port}",
        }
        beside = Path(sys.executable).parent
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("CORNPLUG_")},
            "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}",
            "CORNPLUG_RUNTIME_DIR": str(folder / "run"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            "CORNPLUG_ENCODER_PORT": str(self._port),
        }
        (folder / "run").mkdir(mode=0o700)

    def tries(self, command: str, snippets: list[str]) -> bool:
        """Whether the command works; if not, its output is printed."""
        if command.startswith(_ELSEWHERE):
            return True
        variables, words = [], shlex.split(self._here(command))
        while "=" in words[0]:
            variables.append(words.pop(0).split("=", 1))
        env = {**self._env, **dict(variables)}
        if words[:2] == ["cornplug", "encoder"]:
            return self._serves(words, env, snippets)
        if words[:2] in (["cornplug", "doctor"], ["cornplug", "fingerprint"], ["cornplug", "plan"]):
            more = ["--out", str(self._folder / "plan")] if words[1] == "plan" else []
            return self._runs([*words, *more], env, (0, 1) if words[1] == "doctor" else (0,))
        return False

    def _here(self, text: str) -> str:
        for published, local in self._names.items():
            text = text.replace(published, local)
        return text

    def _runs(self, words: list[str], env: dict[str, str], accepted: tuple[int, ...]) -> bool:
        try:
            done = subprocess.run(
                words,
                env=env,
                cwd=self._folder,
                capture_output=True,
                text=True,
                timeout=_READY_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"{shlex.join(words)}: not done after {_READY_S:g} s", file=sys.stderr)
            return False
        if done.returncode in accepted:
            return True
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        return False

    def _serves(self, words: list[str], env: dict[str, str], snippets: list[str]) -> bool:
        """Whether the service becomes ready, every snippet runs against it, and SIGTERM ends it."""
        log = self._folder / "encoder.log"
        with log.open("w") as out:
            service = subprocess.Popen(words, env=env, cwd=self._folder, stdout=out, stderr=out)
        try:
            problem = self._not_ready(service) or self._snippet_failed(snippets, env)
            service.send_signal(signal.SIGTERM)
            status = service.wait(timeout=_STOP_S)
            problem = problem or (f"it ended with status {status} after SIGTERM" if status else None)
        except subprocess.TimeoutExpired:
            problem = f"it did not end within {_STOP_S:g} s of SIGTERM"
        finally:
            service.kill()
        if problem:
            print(
                f"{log.read_text()[-4000:]}\n{shlex.join(words)}: {problem}; its log is above",
                file=sys.stderr,
            )
        return problem is None

    def _not_ready(self, service: subprocess.Popen[bytes]) -> str | None:
        """Why the service cannot be used, None once /ready answers 200."""
        began, answer = time.monotonic(), "no connection"
        while time.monotonic() < began + _READY_S:
            if service.poll() is not None:
                return f"it ended with status {service.returncode} before it was ready"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/ready", timeout=5):
                    return None
            except (urllib.error.URLError, ConnectionError, TimeoutError) as e:
                answer = str(e)
                time.sleep(0.2)
        load = os.getloadavg()[0]
        return f"/ready not 200 after {_READY_S:g} s (last: {answer}; load average {load:.1f})"

    def _snippet_failed(self, snippets: list[str], env: dict[str, str]) -> str | None:
        for n, snippet in enumerate(snippets, 1):
            if not self._runs([sys.executable, "-c", self._here(snippet)], env, (0,)):
                return f"Python snippet {n} of README failed"
        return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]).resolve()))
