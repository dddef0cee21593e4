"""Runs the examples and makes the page that shows them: `gallery.md`, with what each says, prints and draws.

An example runs again when its text or the library has changed; results are kept in `_build/gallery`.
"""

import ast
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
KEPT = DOCS / "_build" / "gallery"

HEAD = """# Gallery

The scripts in `examples/`, as they ran when this page was built. Each takes less than a minute on two CPU cores, and is
run by the tests.
"""


def build() -> None:
    """Write ``docs/gallery.md``."""
    KEPT.mkdir(parents=True, exist_ok=True)
    sections = [_section(script) for script in sorted((ROOT / "examples").glob("[0-9]*.py"))]
    (DOCS / "gallery.md").write_text("\n".join([HEAD, *sections]))


def _section(script: Path) -> str:
    text = script.read_text()
    title, _, rest = (ast.get_docstring(ast.parse(text)) or script.stem).partition("\n")
    printed, picture = _run(script, text)
    command = " ".join([*_command(text)[1], f"examples/{script.name}", *_options(text)])
    lines = [f"## {title.rstrip('.')}", "", _plain(rest.strip()), "", f"```text\n$ {command}"]
    lines += [printed.rstrip(), "```", ""]
    if picture.exists():
        lines += [f"![{title}](_build/gallery/{picture.name})", ""]
    lines += [f"```{{literalinclude}} ../examples/{script.name}\n:language: python\n```"]
    return "\n".join(lines) + "\n"


RANKS = "torchrun --nproc_per_node 2"
"""Programs of several ranks say this in their text. They run with ``--quick``."""


def _command(text: str) -> tuple[list[str], list[str]]:
    """What runs a script, and how people write that."""
    if RANKS not in text:
        return [sys.executable], ["python"]
    ranks = ["--nproc_per_node", "2"]
    return [sys.executable, "-m", "torch.distributed.run", *ranks], ["OMP_NUM_THREADS=1", "torchrun", *ranks]


def _options(text: str) -> list[str]:
    return ["--quick"] if RANKS in text else []


def _run(script: Path, text: str) -> tuple[str, Path]:
    """What the script prints, and its picture if it draws one."""
    picture = KEPT / f"{script.stem}.png"
    options = ["--output", str(picture)] if '"--output"' in text else []
    library = b"".join(path.read_bytes() for path in sorted((ROOT / "nvalchemiops").rglob("*.py")))
    key = hashlib.sha256(library + text.encode()).hexdigest()
    note = KEPT / f"{script.stem}.txt"
    if note.exists():
        kept, _, printed = note.read_text().partition("\n")
        if kept == key:
            return printed, picture
    command = [*_command(text)[0], str(script), *_options(text), *options]
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if RANKS in text else {})
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if run.returncode:
        raise RuntimeError(f"{script.name} failed:\n{run.stderr[-2000:]}")
    note.write_text(f"{key}\n{run.stdout}")
    return run.stdout, picture


def _plain(text: str) -> str:
    """Docstrings write code with two backticks, Markdown with one."""
    return re.sub(r"``([^`]+)``", r"`\1`", text)


if __name__ == "__main__":
    build()
