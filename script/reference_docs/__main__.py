"""Write every generated page, or say with --check which ones differ from the code (exit status 1)."""

from __future__ import annotations

import sys

from reference_docs import PAGES, TREE, support_matrix


def main(argv: list[str]) -> int:
    stale = []
    if "--check" not in argv:
        support_matrix.mark_old()
    for name, page in PAGES.items():
        file, text = TREE / "docs" / name, page()
        if not file.exists() or file.read_text() != text:
            stale.append(name)
            if "--check" not in argv:
                file.write_text(text)
    said = "differs from the code: run script/docs" if "--check" in argv else "written"
    for name in stale:
        print(f"docs/{name} {said}")
    return 1 if stale and "--check" in argv else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
